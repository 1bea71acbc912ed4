"""One of our own routes: reads a request into models, calls its handler, and writes what that returns.

A handler's signature is the route's contract, and `openapi` is written from it: the parameters `query` and
`body` are pydantic models, `request` is the request itself; what it returns is a dataclass or a mapping (sent
as JSON), None (an empty answer), or a whole response.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.http.auth import Access
from deployments.errors import InvalidRequest
from deployments.router.body import read_body

Handler = Callable[..., Awaitable[object]]
Model = TypeVar("Model", bound=BaseModel)
MAX_BODY_BYTES = 1 << 20
JSON = "application/json"
MAX_SHOWN = 60  # characters of a wrong value in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What a handler takes and returns, from its annotations."""

    query: type[BaseModel] | None
    body: type[BaseModel] | None
    binary: str | None  # a media type of bodies that the handler takes as bytes, beside JSON
    request: bool
    answer: Any  # a type


class Endpoint:
    """One method of one path.

    Args:
        access: whom it is for.
        max_body_bytes: a larger body is refused.
        answer: the type of what a response that the handler makes itself carries.
        media_type: of such a response.
        binary: a media type: the handler takes bodies of it as bytes.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        access: Access = Access.OPERATOR,
        max_body_bytes: int = MAX_BODY_BYTES,
        answer: type | None = None,
        media_type: str = "application/json",
        binary: str | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.handler = handler
        self.access = access
        self.media_type = media_type
        self._max_body_bytes = max_body_bytes
        hints = get_type_hints(handler)
        self.contract = Contract(
            query=hints.get("query"),
            body=_model(hints.get("body")),
            binary=binary,
            request="request" in hints,
            answer=hints["return"] if answer is None else answer,
        )

    async def answer(self, request: Request) -> Response:
        """Answer one request.

        Raises:
            InvalidRequest: the query or the body is not what the handler takes.
            PayloadTooLarge: the body has more bytes than are allowed.
            SlipstreamError: the handler's own.
        """
        arguments: dict[str, object] = {}
        if self.contract.query is not None:
            arguments["query"] = read_query(request, self.contract.query)
        if self.contract.body is not None:
            content = await read_body(request, self._max_body_bytes)
            is_binary = self.contract.binary is not None and _media_type(request) == self.contract.binary
            arguments["body"] = content if is_binary else parse_body(content, self.contract.body)
        if self.contract.request:
            arguments["request"] = request
        return _response(await self.handler(**arguments))


def _model(hint: Any) -> type[BaseModel] | None:
    """The model of `Model`, and of `Model | bytes`."""
    model: type[BaseModel] | None = next((each for each in get_args(hint) if each is not bytes), hint)
    return model


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def read_query(request: Request, model: type[Model]) -> Model:
    """The query parameters as a model; where one is given twice, the last one counts.

    Raises:
        InvalidRequest: a parameter has a value that the model does not take.
    """
    given = request.query_params
    values = {
        name: given.getlist(name) if get_origin(field.annotation) is tuple else given[name]
        for name, field in model.model_fields.items()
        if name in given
    }
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidRequest(explain(error, model)) from error


def parse_body(content: bytes, model: type[Model]) -> Model:
    """The body as a model; an empty body is an empty object.

    Raises:
        InvalidRequest: not a JSON object, or not one that the model takes.
    """
    try:
        return model.model_validate_json(content if content.strip() else b"{}")
    except ValidationError as error:
        raise InvalidRequest(explain(error, model)) from error


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """What was expected and what was given, for each wrong field."""
    by_field: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        # The rest of a location is an index, or the name that pydantic gives to a member of a union.
        by_field.setdefault(str(detail["loc"][0]) if detail["loc"] else "", []).append(detail)
    return "; ".join(_explain_field(name, details, model) for name, details in by_field.items())


def _explain_field(name: str, details: Sequence[ErrorDetails], model: type[BaseModel]) -> str:
    first = details[0]
    match first["type"]:
        case "json_invalid":
            return f"the body must be JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
        case "missing":
            return f"expected the field {name!r}, got {sorted(first['input'])}"
        case "extra_forbidden":
            return f"expected no other fields than {sorted(model.model_fields)}, got {name!r}"
        case "value_error" if not name:
            return str(first["ctx"]["error"])
        case "value_error":
            expected = str(first["ctx"]["error"])
        case _:
            expected = "expected " + " or ".join(d["msg"].removeprefix("Input should be ") for d in details)
    return f"{name or 'the body'}: {expected.split(', unable to ')[0]}, got {_shown(first['input'])}"


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return type(value).__name__
    return repr(value[:MAX_SHOWN] if isinstance(value, str | bytes) else value)


def _response(answer: object) -> Response:
    if isinstance(answer, Response):
        return answer
    if answer is None:
        return Response()
    if is_dataclass(answer) and not isinstance(answer, type):
        # Far faster than `asdict` and `json`, and a fleet may have a thousand members. NaN becomes null.
        return Response(_adapter(type(answer)).dump_json(answer, warnings=False), media_type=JSON)
    try:
        return JSONResponse(answer)
    except ValueError:  # JSON has no NaN: the loss of a step that was skipped for it
        return JSONResponse(_finite(answer))


def _finite(value: Any) -> Any:
    """The same with null for each number that JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
