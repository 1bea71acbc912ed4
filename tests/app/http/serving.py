"""Our own routes as an HTTP client reaches them, in this process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.auth import Guard
from app.http.ingress import build_app
from app.settings.security import Tokens, TokenSource
from deployments.calls.http_server import HttpServer
from deployments.protocol.errors import FleetUnavailable
from deployments.router.scrape import Scraped
from tests.app.http.fake_controller import FakeController, Handle
from tests.deployments.controller_in_process import ControllerInProcess
from tests.loop_thread import LoopThread

MAX_BODY_BYTES = 1000


class FakeRouter:
    """Answers what is not ours, as a replica would."""

    def __init__(self, answer: Callable[[str], object] = lambda path: {"replica": path}) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(self._answer(scope["path"]))(scope, receive, send)


class NoReplica:
    """Stands for the router of a fleet whose replicas are gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise FleetUnavailable("no replica is ready")


async def no_metrics(names: Sequence[str]) -> Scraped:
    return Scraped()


def tokens(operator: str | None = None, user: str | None = None) -> Tokens:
    given = [TokenSource(tokens=() if token is None else (token,)) for token in (operator, user)]
    return Tokens(operator=given[0], user=given[1])


def application(
    controller: FakeController | ControllerInProcess,
    *,
    trainer: object | None = None,
    token: str | None = None,
    user_token: str | None = None,
    router: ASGIApp | None = None,
    allow_pickled_ipc: bool = False,
    checkpoint_roots: Sequence[Path] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    behind = controller if isinstance(controller, ControllerInProcess) else Handle(controller)
    return build_app(
        Guard(tokens(token, user_token)),
        FakeRouter() if router is None else router,
        behind,  # type: ignore[arg-type]
        None if trainer is None else Handle(trainer),  # type: ignore[arg-type]
        scrape=no_metrics,
        checkpoint_roots=checkpoint_roots,
        allow_pickled_ipc=allow_pickled_ipc,
        max_body_bytes=max_body_bytes,
    )


def client(
    controller: FakeController | ControllerInProcess, *, root_path: str = "", **options: Any
) -> httpx.AsyncClient:
    """A client of `application` with these options."""
    app = application(controller, **options)
    # An error that is answered with 500 is raised again by Starlette, for the server's log.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://fleet")


@contextmanager
def on_a_socket(app: ASGIApp) -> Iterator[str]:
    """The application on a port of its own, in a thread of its own, for clients that are no ASGI clients.

    Yields its host and port.
    """
    loop = LoopThread()

    async def start() -> HttpServer:
        return HttpServer(app, "127.0.0.1")  # type: ignore[arg-type]

    server = loop.run(start())
    try:
        yield server.address
    finally:
        loop.run(server.close())
        loop.close()
