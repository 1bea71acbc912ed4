"""Our own routes as an HTTP client reaches them, in this process."""

from collections.abc import Callable

import httpx
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from app.http.auth import Guard
from app.http.engine_routes import EngineRoutes
from app.http.fleet_routes import FleetRoutes
from app.http.ingress import build_app
from app.http.train_routes import TrainRoutes
from app.http.weight_routes import WeightRoutes
from tests.app.http.fake_controller import FakeController, Handle

MAX_BODY_BYTES = 1000


class FakeRouter:
    """Answers what is not ours, as a replica would."""

    def __init__(self, answer: Callable[[str], object] = lambda path: {"replica": path}) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(self._answer(scope["path"]))(scope, receive, send)


def client(
    controller: FakeController,
    *,
    trainer: object | None = None,
    token: str | None = None,
    router: FakeRouter | None = None,
    allow_pickled_ipc: bool = False,
) -> httpx.AsyncClient:
    handle, training = Handle(controller), None if trainer is None else Handle(trainer)
    endpoints = [
        *FleetRoutes(handle, training).endpoints(),
        *WeightRoutes(handle, MAX_BODY_BYTES, allow_pickled_ipc=allow_pickled_ipc).endpoints(),
        *EngineRoutes(handle, MAX_BODY_BYTES).endpoints(),
        *TrainRoutes(training, MAX_BODY_BYTES).endpoints(),
    ]
    app = build_app(endpoints, Guard(token), FakeRouter() if router is None else router)
    # An error that is answered with 500 is raised again by Starlette, for the server's log.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://fleet")
