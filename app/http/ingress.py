"""The ingress: our routes in FastAPI; vLLM's are forwarded without parsing."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http import engine_routes, fleet_routes, rollout_routes, train_routes, weight_routes
from app.http.auth import Access, Guard, Unauthorized, passed_access, require_guarded
from app.http.directory_publisher import DirectoryPublisher
from app.http.fleet_routes import Scrape
from app.http.openapi import description
from app.http.route import MAX_BODY_BYTES, GuardedRoute, Routes, explain
from app.settings.security import Tokens
from deployments.calls.rpc import CallHandle, is_lost
from deployments.host.logs import serve_logger
from deployments.protocol import errors
from deployments.protocol.passed_routes import require_passed, route_path
from deployments.protocol.rollouts import (
    GENERATING,
    GROUP_HEADER,
    ID_HEADER,
    NAMES,
    ROLLOUT_URL,
    SIZE_HEADER,
    rollout_of,
)
from deployments.router.forwarding import RouterLimits, one_line
from deployments.router.router import Router

# They contain no fleet data; the page fetches it with a token.
PAGE = Path(__file__).with_name("page")
PAGE_FILES = {
    "/": "page.html",
    **{f"/page/{name}": name for name in ("page.css", "page.js", "uPlot.iife.min.js", "uPlot.min.css")},
}
NAMED = frozenset(name.encode() for name in NAMES)
FREQUENT = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")
logger = serve_logger()
OWN = Routes()  # the reference's order


@OWN("GET", "/openapi.json", access=Access.USER, include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    state = request.app.state
    return JSONResponse(await description(request.app, state.router, state.guard.asks))


def _sender(file: Path) -> Callable[[], Awaitable[FileResponse]]:
    async def send() -> FileResponse:
        return FileResponse(file, headers={"cache-control": "no-cache"})

    return send


for path, name in PAGE_FILES.items():
    OWN("GET", path, access=Access.OPEN, response_class=FileResponse, include_in_schema=False)(
        _sender(PAGE / name)
    )
for module in (fleet_routes, weight_routes, engine_routes, train_routes, rollout_routes):
    OWN += module.routes


class Ingress:
    """`trainer` is None for an external trainer."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        rollout: DeploymentHandle,
        controller: DeploymentHandle,
        trainer: DeploymentHandle | None,
        limits: RouterLimits,
        tokens: Tokens,
        allow_pickled_ipc: bool,
        checkpoint_roots: Sequence[Path] = (),
        checkpoint_urls: Sequence[str] = (),
    ) -> None:
        self._router, self._limits = Router(rollout, limits), limits
        guard = Guard(tokens)
        await require_guarded(has_token=guard.asks(Access.OPERATOR))
        self._app = build_app(
            guard,
            self._router,
            CallHandle(controller),
            None if trainer is None else CallHandle(trainer),
            scrape=self._router.metrics,
            checkpoint_roots=checkpoint_roots,
            checkpoint_urls=checkpoint_urls,
            allow_pickled_ipc=allow_pickled_ipc,
            max_body_bytes=limits.max_body_bytes,
        )

    def reconfigure(self, settings: Mapping[str, Any]) -> None:
        """Serve's hook for live settings."""
        self._router.limits = replace(self._limits, **settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def __del__(self) -> None:  # Serve awaits it
        await self._router.close()


def build_app(
    guard: Guard,
    router: ASGIApp,
    controller: CallHandle,
    trainer: CallHandle | None = None,
    *,
    scrape: Scrape,
    checkpoint_roots: Sequence[Path] = (),
    checkpoint_urls: Sequence[str] = (),
    allow_pickled_ipc: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    passed_on = _PassedOn(router, guard)
    app = FastAPI(
        title="Slipstream",
        version="1",
        openapi_url=None,  # ours includes vLLM's routes
        docs_url=None,
        # Serve and Starlette match routes in order: frequent ones first.
        routes=[*[Route(path, passed_on) for path in FREQUENT], *OWN, Route("/{path:path}", passed_on)],
        exception_handlers={
            ClientDisconnect: answer_disconnected,
            errors.SlipstreamError: answer_error,
            RequestValidationError: answer_wrong_request,
            RayError: answer_foreign_error,
            RayServeException: answer_foreign_error,
            Exception: answer_foreign_error,
        },
    )
    state = app.state
    state.guard, state.max_body_bytes, state.allow_pickled_ipc = guard, max_body_bytes, allow_pickled_ipc
    state.router, state.scrape = router, scrape
    state.controller, state.trainer = controller, trainer
    state.directories = DirectoryPublisher(controller, checkpoint_roots, checkpoint_urls)
    return app


class _PassedOn:
    """Forwards vLLM's routes to a replica; 404 or 405 for all others once the token is checked: without one a
    caller cannot tell which routes exist. Gets requests for our routes with HEAD or a wrong method."""

    def __init__(self, router: ASGIApp, guard: Guard) -> None:
        self._router = router
        self._guard = guard
        self._own = {route.path: route for route in OWN}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope["path"], scope.get("root_path", ""))
        if (found := ROLLOUT_URL.fullmatch(path)) is not None:
            *named, path = found.groups()
            given = zip((GROUP_HEADER, SIZE_HEADER, ID_HEADER), named, strict=True)
            headers = [(name.encode(), value.encode()) for name, value in given if value is not None]
            path_below = {"path": scope.get("root_path", "") + path}
            scope = {**scope, **path_below, "headers": [*scope["headers"], *headers]}
        route = self._own.get(path)
        if route is not None and scope["method"] in route.allowed:
            scope["route"] = route
            return await route.app(scope, receive, send)
        if scope["method"] != "OPTIONS":  # CORS preflight carries no token
            self._guard.check(Request(scope), passed_access(path))
        if route is not None:
            expected = " or ".join(route.allowed)
            raise errors.MethodNotAllowed(
                f"{path}: expected {expected}, got {scope['method'][:20]!r}", {"allow": route.allowed}
            )
        require_passed(scope["method"], path)
        if scope["method"] == "POST" and path in GENERATING:
            own = {
                name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in NAMED
            }
            if ID_HEADER in own:
                scope["rollout"] = rollout_of(own, self._guard.owner(Request(scope)), path)
        await self._router(scope, receive, send)


async def answer_error(request: Request, error: Exception) -> Response:
    """Clients retry a POST on 5xx: a call that may have changed the fleet gets 409."""
    assert isinstance(error, errors.SlipstreamError)
    if error.detail.get("unreachable") and _changes_fleet(request):
        error = errors.AnswerLost(f"{error.message}; it may have been done", error.detail)
    status = 409 if error.status == 500 and _changes_fleet(request) else error.status
    headers = {}
    if status == 503:
        headers["retry-after"] = str(round(error.detail.get("retry_after_s", 1)))
    if isinstance(error, Unauthorized) and "x-requested-with" not in request.headers:
        # For browsers. The page sends this header and requests the token itself.
        headers["www-authenticate"] = 'Basic realm="Slipstream", charset="UTF-8"'
    if error.status == 405:
        headers["allow"] = ", ".join(error.detail["allow"])
    return JSONResponse(error.body(), status_code=status, headers=headers)


async def answer_wrong_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await answer_error(request, errors.InvalidRequest(explain(error, request.scope["route"])))


async def answer_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def answer_foreign_error(request: Request, error: Exception) -> Response:
    cause: Any = getattr(error, "cause", None)  # the text of a RayTaskError is a traceback
    raised = cause if isinstance(cause, BaseException) else error
    if isinstance(raised, errors.SlipstreamError):
        return await answer_error(request, raised)
    if is_lost(raised):  # raised by the address look-up; nothing was sent
        text = f"{request.url.path}: the controller or trainer is gone and being restarted; try again"
        return await answer_error(request, errors.FleetUnavailable(text, {"reason": type(raised).__name__}))
    text = one_line(raised)
    logger.error("%s %s: %s", request.method, request.url.path, text)
    return await answer_error(request, errors.SlipstreamError(text))


def _changes_fleet(request: Request) -> bool:
    route = request.scope.get("route")
    return isinstance(route, GuardedRoute) and route.changes_fleet
