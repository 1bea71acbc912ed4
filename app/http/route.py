"""FastAPI's route with an access level and a body limit, checked before parsing; what handlers use."""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic.fields import FieldInfo
from pydantic_core import from_json

from app.http.auth import READING, Access
from app.http.directory_publisher import DirectoryPublisher
from deployments.calls.rpc import CallHandle
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.responses import ErrorBody
from deployments.router.request_inspection import read_body

MAX_BODY_BYTES = 1 << 20
MAX_SHOWN = 60
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[object]])
FAILED = {"description": "what was expected and what was given", "model": ErrorBody}


class GuardedRoute(APIRoute):
    """One method of one path.

    Args:
        large: the body limit of forwarded requests instead of one MiB.
        binary: the handler gets a body of this media type as bytes.
        head: a GET route also answers HEAD.
        repeatable: a call whose answer was lost may be sent again.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Callable[..., Awaitable[object]],
        *,
        access: Access = Access.OPERATOR,
        large: bool = False,
        binary: str | None = None,
        head: bool = True,
        repeatable: bool = False,
        **options: Any,
    ) -> None:
        self.access = access
        self.changes_fleet = access is Access.OPERATOR and method not in READING and not repeatable
        self.allowed = ["GET", "HEAD"] if method == "GET" and head else [method]
        self._large, self._binary = large, binary
        summary, _, rest = inspect.cleandoc(handler.__doc__ or "").partition("Raises:")[0].partition("\n\n")
        super().__init__(
            path,
            handler,
            methods=[method],
            tags=["slipstream"],
            summary=" ".join(summary.split()),
            description=rest.strip(),
            responses={"default": FAILED},
            **options,
        )
        if self.body_field is not None:
            body: dict[str, Any] = {"required": any(each.is_required() for each in self.body_fields.values())}
            if binary is not None:
                body["content"] = {binary: {"schema": {"type": "string", "format": "binary"}}}
            self.openapi_extra = {"requestBody": body}

    @property
    def body_fields(self) -> Mapping[str, FieldInfo]:
        assert self.body_field is not None
        model: Any = self.body_field.field_info.annotation
        return model.model_fields

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            state = request.app.state
            state.guard.check(request, self.access)
            if self.body_field is not None:
                max_bytes = state.max_body_bytes if self._large else MAX_BODY_BYTES
                request = _Read(request, await read_body(request, max_bytes), self._binary)
            return await handler(request)

        return answer


class Routes(list[GuardedRoute]):
    """Called, it decorates a handler; arguments as `GuardedRoute`."""

    def __call__(self, method: str, path: str, **options: Any) -> Callable[[Handler], Handler]:
        def added(handler: Handler) -> Handler:
            self.append(GuardedRoute(method, path, handler, **options))
            return handler

        return added


def of_app(name: str) -> Any:
    """A parameter of a handler from `app.state`, which `ingress.build_app` sets."""

    async def found(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(found)


async def _trainer(request: Request) -> CallHandle:
    if request.app.state.trainer is None:
        raise InvalidRequest("this fleet has no trainer deployment: set `trainer` in its configuration")
    return request.app.state.trainer


Controller = Annotated[CallHandle, of_app("controller")]
Trainer = Annotated[CallHandle, Depends(_trainer)]
Directories = Annotated[DirectoryPublisher, of_app("directories")]


class _Read(Request):
    """A complete body: JSON of any media type; empty means {}. Raises InvalidRequest."""

    def __init__(self, request: Request, content: bytes, binary: str | None) -> None:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        headers, self._content, self._value = request.scope["headers"], content, None
        if media_type != binary:
            headers = [(b"content-type", b"application/json"), *headers]
            self._content = content.strip() or b"{}"
            try:
                self._value = from_json(self._content)
            except ValueError as error:
                raise InvalidRequest(f"the body must be JSON: {error}") from error
        super().__init__({**request.scope, "headers": headers})

    async def body(self) -> bytes:
        return self._content

    async def json(self) -> Any:
        return self._value


def explain(error: RequestValidationError, route: GuardedRoute) -> str:
    by_field: dict[str, list[Any]] = {}
    for detail in error.errors():
        # Any other part of a location is an index, or pydantic's name for a union member.
        by_field.setdefault(str(detail["loc"][1]) if detail["loc"][1:] else "", []).append(detail)
    return "; ".join(_explain_field(name, details, route) for name, details in by_field.items())


def _explain_field(name: str, details: Sequence[Any], route: GuardedRoute) -> str:
    first = details[0]
    match first["type"]:
        case "missing" if name:
            return f"expected the field {name!r}, got {sorted(first['input'] or ())}"
        case "extra_forbidden":
            return f"expected no other fields than {sorted(route.body_fields)}, got {name!r}"
        case "value_error" if not name:
            return str(first["ctx"]["error"])
        case "value_error":
            expected = str(first["ctx"]["error"])
        case "missing" | "model_attributes_type" | "dict_type":
            expected = "expected an object"
        case _:
            expected = "expected " + " or ".join(d["msg"].removeprefix("Input should be ") for d in details)
    return f"{name or 'the body'}: {expected.split(', unable to ')[0]}, got {_shown(first['input'])}"


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return type(value).__name__
    return repr(value[:MAX_SHOWN] if isinstance(value, str | bytes) else value)
