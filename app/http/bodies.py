"""Request bodies of our own routes: JSON objects, with clear complaints."""

import json
from typing import Any

from starlette.requests import Request

from deployments.errors import InvalidRequest
from deployments.router.router import read_body


async def json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty object.

    Raises:
        InvalidRequest: not JSON, or not an object.
        PayloadTooLarge: more than `max_bytes`.
    """
    body = await read_body(request, max_bytes)
    if not body.strip():
        return {}
    try:
        value = json.loads(body)
    except ValueError as error:
        raise InvalidRequest(f"the body must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(value).__name__}")
    return value


def field(body: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """One field of a body; `...` as default means that it is required.

    Raises:
        InvalidRequest: missing, or of another type.
    """
    value = body.get(name, default)
    if value is ...:
        raise InvalidRequest(f"the body must have the field {name!r}, got {sorted(body)}")
    if value is not default and not isinstance(value, kind):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise InvalidRequest(f"{name!r} must be of type {kinds}, got {type(value).__name__}")
    return value
