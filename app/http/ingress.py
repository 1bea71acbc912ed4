"""The ingress: the routes of the fleet, the trainer and the weights; everything else goes to a replica."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app.http.auth import Guard
from app.http.endpoint import Endpoint
from app.http.engine_routes import EngineRoutes
from app.http.fleet_routes import FleetRoutes
from app.http.openapi import fetch, merged, own_document
from app.http.page import page
from app.http.train_routes import TrainRoutes
from app.http.weight_routes import WeightRoutes
from deployments.errors import SlipstreamError
from deployments.logs import serve_logger
from deployments.router.router import Router, RouterLimits

logger = serve_logger()


class Ingress:
    """Serve's deployment class of the router.

    Args:
        trainer: None where an outside program publishes.
        token: of control and train routes; None leaves them open (loopback only).
        allow_pickled_ipc: read CUDA IPC handles that vLLM's client has pickled.
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
        max_bytes = limits.max_body_bytes
        self._endpoints = [
            *FleetRoutes(controller, trainer).endpoints(),
            *WeightRoutes(controller, max_bytes, allow_pickled_ipc=allow_pickled_ipc).endpoints(),
            *EngineRoutes(controller, max_bytes).endpoints(),
            *TrainRoutes(trainer, max_bytes).endpoints(),
        ]

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_app(self._endpoints, self._guard, self._router)

    async def __del__(self) -> None:  # Serve awaits it
        await self._router.close()


def build_app(endpoints: Sequence[Endpoint], guard: Guard, router: ASGIApp) -> Starlette:
    """The ASGI application of our own routes.

    Args:
        router: answers all other requests.
    """

    async def openapi(request: Request) -> Response:
        ours = own_document(endpoints, guard.guards)
        theirs = await fetch(router)
        return JSONResponse(ours if theirs is None else merged(theirs, ours))

    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/openapi.json", openapi, methods=["GET"]),
            *[Route(each.path, _guarded(each, guard), methods=[each.method]) for each in endpoints],
            Route("/{path:path}", router),
        ],
        exception_handlers={
            SlipstreamError: answer_error,
            HTTPException: answer_http_error,
            RayError: answer_foreign_error,
            Exception: answer_foreign_error,
        },
    )


def _guarded(endpoint: Endpoint, guard: Guard) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        guard.check(request)
        return await endpoint.answer(request)

    return answer


async def answer_error(request: Request, error: Exception) -> Response:
    """An error that Slipstream raised for the caller."""
    assert isinstance(error, SlipstreamError)
    headers = {}
    if error.status == 503:
        headers["retry-after"] = str(round(error.detail.get("retry_after_s", 1)))
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


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
    was raised.
    """
    cause: Any = getattr(error, "cause", None)
    raised = cause if isinstance(cause, BaseException) else error
    if isinstance(raised, SlipstreamError):
        return await answer_error(request, raised)
    text = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised).strip() else ''}"
    logger.error("%s %s: %s", request.method, request.url.path, text)
    body = {"error": {"type": "internal_error", "message": text, "detail": {}}}
    return JSONResponse(body, status_code=500)
