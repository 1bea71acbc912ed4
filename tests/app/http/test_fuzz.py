"""The HTTP surface, fuzzed from its own OpenAPI document: the real application over a fake controller."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from deployments.errors import FleetUnavailable
from deployments.replica.http_front import ReplicaServer
from tests.app.http.fake_controller import FakeController
from tests.app.http.fake_trainer import FakeTrainer
from tests.app.http.fuzzing import fuzz
from tests.app.http.serving import application

pytestmark = pytest.mark.timeout(600)


class NoReplica:
    """Stands for the router of a fleet whose replicas are gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise FleetUnavailable("no replica is ready")


@pytest.fixture(params=[None, "operator-0123456789"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    """The application on a socket, in a thread of its own; its address, and the headers of the operator."""
    token: str | None = request.param
    loop, address = asyncio.new_event_loop(), ""
    ready = threading.Event()

    async def serve() -> None:
        nonlocal address
        app = application(
            FakeController(), trainer=FakeTrainer(), token=token, router=NoReplica(), allow_pickled_ipc=True
        )
        server = ReplicaServer(app, "127.0.0.1")
        address = server.address
        ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()

    task = loop.create_task(serve())

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield f"http://{address}", {} if token is None else {"authorization": f"Bearer {token}"}
    loop.call_soon_threadsafe(task.cancel)
    thread.join(10)


def test_every_operation_answers_whatever_is_sent(
    served: tuple[str, dict[str, str]], record_property: Any
) -> None:
    url, headers = served
    document = httpx.get(f"{url}/openapi.json", headers=headers).json()
    # Its answer does not end; what it takes is fuzzed below.
    tally = fuzz(url, document, headers=headers, skip=lambda path: path == "/fleet/events")
    print(f"{tally.requests} requests, {dict(tally.statuses)}, the slowest took {tally.slowest_s:.2f} s")
    assert tally.statuses[200] and tally.statuses[400]


def test_every_operation_refuses_whoever_has_no_token(served: tuple[str, dict[str, str]]) -> None:
    url, headers = served
    if not headers:
        return
    document = httpx.get(f"{url}/openapi.json", headers=headers).json()
    tally = fuzz(url, document, skip=lambda path: path == "/health", examples=2)
    # 400: what no server takes for a request.
    assert set(tally.statuses) <= {400, 401, 405}, tally
