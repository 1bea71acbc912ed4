"""The ingress: fleet, train and weight routes of our own; everything else goes to a replica."""

from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.http.auth import Guard
from app.http.fleet_routes import FleetRoutes
from app.http.page import page
from app.http.train_routes import TrainRoutes
from app.http.weight_routes import WeightRoutes
from deployments.errors import SlipstreamError
from deployments.logs import serve_logger
from deployments.router.router import Router, RouterLimits

logger = serve_logger()

Endpoint = Callable[[Request], Awaitable[Response]]


class Ingress:
    """Serve's deployment class of the router.

    Args:
        trainer: None where an outside program publishes.
        token: of control and train routes; None leaves them open (loopback only).
    """

    def __init__(
        self,
        rollout: DeploymentHandle,
        controller: DeploymentHandle,
        trainer: DeploymentHandle | None,
        limits: RouterLimits,
        token: str | None,
        allow_pickled_ipc: bool,
    ) -> None:
        self._router = Router(rollout, limits)
        self._guard = Guard(token)
        self._fleet = FleetRoutes(controller, trainer)
        self._weights = WeightRoutes(controller, limits.max_body_bytes, allow_pickled_ipc=allow_pickled_ipc)
        self._train = TrainRoutes(trainer, limits.max_body_bytes)

    def __serve_build_asgi_app__(self) -> Starlette:
        guarded = [*self._fleet.table(), *self._weights.table(), *self._train.table()]
        return Starlette(
            routes=[
                Route("/", page, methods=["GET"]),
                *[Route(path, self._guarded(call), methods=[method]) for method, path, call in guarded],
                Route("/{path:path}", self._router),
            ],
            exception_handlers={
                SlipstreamError: _say,
                HTTPException: _say_http,
                RayError: _say_foreign,
                Exception: _say_foreign,
            },
        )

    async def __del__(self) -> None:  # Serve awaits it
        await self._router.close()

    def _guarded(self, call: Endpoint) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            self._guard.check(request)
            return await call(request)

        return endpoint


async def _say(request: Request, error: Exception) -> Response:
    assert isinstance(error, SlipstreamError)
    headers = {}
    if error.status == 503:
        headers["retry-after"] = str(round(error.detail.get("retry_after_s", 1)))
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _say_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body: dict[str, Any] = {
        "error": {
            "type": "method_not_allowed" if error.status_code == 405 else "http_error",
            "message": f"{request.method} {request.url.path}: {error.detail}",
            "detail": {},
        }
    }
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _say_foreign(request: Request, error: Exception) -> Response:
    # Serve hands errors of other deployments over as RayTaskError, whose text is a traceback; its cause
    # is what was raised.
    cause: Any = getattr(error, "cause", None)
    raised = cause if isinstance(cause, BaseException) else error
    if isinstance(raised, SlipstreamError):
        return await _say(request, raised)
    text = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised).strip() else ''}"
    logger.error("%s %s: %s", request.method, request.url.path, text)
    body = {"error": {"type": "internal_error", "message": text, "detail": {}}}
    return JSONResponse(body, status_code=500)
