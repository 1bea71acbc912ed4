import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from deployments.calls.http_server import HttpServer
from deployments.protocol.routing import KEY_HEADER, ROUTER_HEADER, Demand, router_header
from deployments.replica.http_front import ReplicaFront
from tests.waiting import reached

NEWER = {"x-min-weight-version": "4"}


class Replica:
    """A front on its own server, whose weights are of version 3; `opens` ends its wait for admission."""

    def __init__(self) -> None:
        self.opens = asyncio.Event()
        self.refusal: Exception | None = None
        app = Starlette(routes=[Route("/", self._echo, methods=["POST"])])
        self.front = ReplicaFront(
            app,
            replica_id="r0",
            admit=self._admit,
            refusal=lambda: None,
            version=lambda: 3,
            require_passed=lambda method, path: None,
        )
        self.server = HttpServer(self.front, "127.0.0.1")
        self.client = aiohttp.ClientSession()

    async def post(self, body: Any) -> tuple[int, bytes]:
        headers = {
            **NEWER,
            KEY_HEADER.decode(): self.front.key,
            ROUTER_HEADER.decode(): router_header("router", 2),
        }
        url = f"http://{self.server.address}/"
        async with self.client.post(url, data=body, headers=headers) as answer:
            return answer.status, await answer.read()

    async def until(self, *, in_flight: int) -> None:
        await reached(lambda: self.front.in_flight == in_flight)

    async def _admit(self, demand: Demand) -> None:
        await self.opens.wait()
        if self.refusal is not None:
            raise self.refusal

    async def _echo(self, request: Request) -> Response:
        return PlainTextResponse(await request.body())


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    yield made
    await made.client.close()
    await made.server.close()


async def test_client_disconnect_ends_the_wait_for_a_version(replica: Replica) -> None:
    asked = asyncio.create_task(replica.post(b"x" * 300_000))  # more than uvicorn reads ahead
    await replica.until(in_flight=1)
    assert replica.front.load == {"router": 2}
    await asyncio.sleep(0.1)
    asked.cancel()
    await replica.until(in_flight=0)
    assert replica.front.load == {}


async def test_body_received_during_the_wait_is_complete(replica: Replica) -> None:
    sent = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(4):
            yield bytes([number]) * 50_000
            await asyncio.sleep(0.01)
        sent.set()
        await asyncio.sleep(0.05)
        yield b"the end, after admission"

    asked = asyncio.create_task(replica.post(pieces()))
    await sent.wait()
    replica.opens.set()
    body = b"".join(bytes([number]) * 50_000 for number in range(4)) + b"the end, after admission"
    assert await asked == (200, body)


async def test_stop_refuses_waiting_requests(replica: Replica) -> None:
    asked = asyncio.create_task(replica.post(b"x"))
    await replica.until(in_flight=1)
    replica.front.stop(in_order=True)
    status, body = await asked
    assert status == 503 and b"shutting down" in body
