"""The ingress: the routes of the fleet, the trainer and the weights; everything else goes to a replica."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.adapter_routes import AdapterRoutes
from app.http.auth import READING, Access, Guard, Tokens, Unauthorized, passed_access
from app.http.client_routes import ClientRoutes
from app.http.directory_publisher import DirectoryPublisher
from app.http.endpoint import Endpoint
from app.http.engine_routes import EngineRoutes
from app.http.fleet_routes import FleetRoutes
from app.http.openapi import Description
from app.http.page import page
from app.http.serve_address import require_guarded
from app.http.train_routes import TrainRoutes
from app.http.weight_routes import WeightRoutes
from deployments.errors import AnswerLost, FleetUnavailable, MethodNotAllowed, SlipstreamError
from deployments.logs import serve_logger
from deployments.lost_calls import is_lost
from deployments.passed_routes import require_passed, route_path
from deployments.router.limits import RouterLimits
from deployments.router.router import Router
from deployments.unary import UnaryHandle

FREQUENT = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")  # of those that pass
logger = serve_logger()


class Ingress:
    """Serve's deployment class of the router.

    Args:
        trainer: None where an outside program publishes.
        tokens: of the operator and of users.
        allow_pickled_ipc: read CUDA IPC handles that vLLM's client has pickled.
        checkpoint_roots: directories below which checkpoints may be published.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        rollout: DeploymentHandle,
        controller: DeploymentHandle,
        trainer: DeploymentHandle | None,
        limits: RouterLimits,
        tokens: Tokens,
        allow_pickled_ipc: bool,
        checkpoint_roots: Sequence[Path] = (),
    ) -> None:
        self._router, self._limits = Router(rollout, limits), limits
        fleet, training = UnaryHandle(controller), None if trainer is None else UnaryHandle(trainer)
        self._guard = Guard(tokens)
        await require_guarded(has_token=self._guard.asks(Access.OPERATOR))
        max_bytes = limits.max_body_bytes
        directories = DirectoryPublisher(fleet, checkpoint_roots)
        weights = WeightRoutes(fleet, max_bytes, directories, allow_pickled_ipc=allow_pickled_ipc)
        self._endpoints = [
            *FleetRoutes(fleet, training, directories, self._router.metrics).endpoints(),
            *ClientRoutes(fleet).endpoints(),
            *weights.endpoints(),
            *EngineRoutes(fleet, max_bytes).endpoints(),
            *AdapterRoutes(fleet).endpoints(),
            *TrainRoutes(training, max_bytes).endpoints(),
        ]

    def reconfigure(self, settings: Mapping[str, float]) -> None:
        """Serve's call with new limits, by the names of the section `router`."""
        self._router.limits = self._limits.with_settings(settings)

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_app(self._endpoints, self._guard, self._router)

    async def __del__(self) -> None:  # Serve awaits it
        await self._router.close()


def build_app(endpoints: Sequence[Endpoint], guard: Guard, router: ASGIApp) -> Starlette:
    """The ASGI application of our own routes.

    Args:
        router: answers all other requests.
    """

    description = Description(endpoints, router, guard.asks)

    async def openapi(request: Request) -> Response:
        return JSONResponse(await description.document())

    own = [
        Route("/", _guarded(page, guard, Access.OPERATOR), methods=["GET"]),
        Route("/openapi.json", _guarded(openapi, guard, Access.USER), methods=["GET"]),
        *[_route(each, guard) for each in endpoints],
    ]
    passed_on = _PassedOn(router, guard, own)
    return Starlette(
        # Serve and Starlette each try route after route: the most frequent come first.
        routes=[*[Route(path, passed_on) for path in FREQUENT], *own, Route("/{path:path}", passed_on)],
        exception_handlers={
            ClientDisconnect: answer_nobody,
            SlipstreamError: answer_error,
            HTTPException: answer_http_error,
            RayError: answer_foreign_error,
            RayServeException: answer_foreign_error,
            Exception: answer_foreign_error,
        },
    )


class _PassedOn:
    """Answers what is not ours: by a replica if the route passes through, else by an error.

    Whoever needs a token and has none learns nothing of the routes.

    Args:
        own: the routes that a request did not match; one of the same path takes other methods.
    """

    def __init__(self, router: ASGIApp, guard: Guard, own: Sequence[Route]) -> None:
        self._router = router
        self._guard = guard
        self._methods: dict[str, set[str]] = {}
        for route in own:
            self._methods.setdefault(route.path, set()).update(route.methods or ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope["path"], scope.get("root_path", ""))
        if scope["method"] != "OPTIONS":  # a browser asks with it whether it may send the token
            self._guard.check(Request(scope), passed_access(path))
        allowed = sorted(self._methods.get(path, ()))
        if allowed:
            raise MethodNotAllowed(
                f"{path}: expected {' or '.join(allowed)}, got {scope['method'][:20]!r}", {"allow": allowed}
            )
        require_passed(scope["method"], path)
        await self._router(scope, receive, send)


def _route(endpoint: Endpoint, guard: Guard) -> Route:
    async def answer(request: Request) -> Response:
        request.state.changes_fleet = endpoint.access is Access.OPERATOR and endpoint.method not in READING
        return await endpoint.answer(request)

    handler = _guarded(answer, guard, endpoint.access)
    route = Route(endpoint.path, handler, methods=[endpoint.method])
    if endpoint.media_type == "text/event-stream" and route.methods is not None:
        route.methods.discard("HEAD")  # Starlette adds it: an answer without a body that never ends
    return route


def _guarded(
    handler: Callable[[Request], Awaitable[Response]], guard: Guard, access: Access
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        guard.check(request, access)
        return await handler(request)

    return answer


async def answer_error(request: Request, error: Exception) -> Response:
    """An error that Slipstream raised for the caller."""
    assert isinstance(error, SlipstreamError)
    headers = {}
    if error.status == 503:
        headers["retry-after"] = str(round(error.detail.get("retry_after_s", 1)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = 'Basic realm="Slipstream", charset="UTF-8"'  # so that a browser asks
    if error.status == 405:
        headers["allow"] = ", ".join(error.detail["allow"])
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def answer_nobody(request: Request, error: Exception) -> Response:
    """The client left before its request had arrived."""
    return Response(status_code=499)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """An error of Starlette's, in our shape."""
    assert isinstance(error, HTTPException)
    body: dict[str, Any] = {
        "error": {
            "type": "method_not_allowed" if error.status_code == 405 else "http_error",
            "message": f"{request.method} {request.url.path}: {error.detail}",
            "detail": {},
        }
    }
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def answer_foreign_error(request: Request, error: Exception) -> Response:
    """Any other error, as one line.

    Serve passes errors of other deployments on as RayTaskError, whose text is a traceback; its cause is what
    was raised. A call that was to change the fleet gets no 500, on which clients would send it again.
    """
    cause: Any = getattr(error, "cause", None)
    raised = cause if isinstance(cause, BaseException) else error
    if isinstance(raised, SlipstreamError):
        return await answer_error(request, raised)
    if is_lost(raised):
        return await answer_error(request, _lost(request, raised))
    text = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised).strip() else ''}"
    logger.error("%s %s: %s", request.method, request.url.path, text)
    body = {"error": {"type": "internal_error", "message": text, "detail": {}}}
    return JSONResponse(body, status_code=409 if _changes_fleet(request) else 500)


def _lost(request: Request, error: BaseException) -> SlipstreamError:
    """The controller or the trainer is gone, and Serve starts another one; or it cannot be reached."""
    path = request.url.path
    if isinstance(error, ActorUnavailableError) and _changes_fleet(request):
        text = f"{path}: the process that was to answer cannot be reached, and may have done what was asked"
        return AnswerLost(text, {"reason": type(error).__name__})
    gone = "cannot be reached" if isinstance(error, ActorUnavailableError) else "is gone"
    text = f"{path}: the process that was to answer {gone}; another one is being started, try again"
    return FleetUnavailable(text, {"reason": type(error).__name__})


def _changes_fleet(request: Request) -> bool:
    return getattr(request.state, "changes_fleet", False) is True
