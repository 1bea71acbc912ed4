"""A replica that is stopped, or cut off, keeps its connections open and says nothing."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import pytest

from deployments.protocol.routing import Demand
from deployments.router.connections import Patience, Probes
from deployments.router.router import Router
from tests.deployments.router.router_scene import LIMITS, OK, StubReplica

BEGUN = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n"
)


class InTurn:
    """Stands for Serve's handle: the replicas one after the other, the last one again and again."""

    def __init__(self, *addresses: str) -> None:
        self._left = list(addresses)

    @asynccontextmanager
    async def choose_replica(self, demand: Demand, *, _reserve: bool) -> AsyncIterator[Any]:
        address = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        yield SimpleNamespace(replica_id=address, replica_metadata={"address": address, "key": "k"})


class Stops(StubReplica):
    """Begins to answer, and stops with everything that it does."""

    def __init__(self, response: bytes, *, at_once: bool = False) -> None:
        super().__init__(response)
        self._stopped = at_once

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._stopped:
            self._stopped = True
            writer.write(self.response)
            await writer.drain()
        try:
            await asyncio.sleep(3600)
        finally:
            writer.close()


class Slow(StubReplica):
    """Takes its time for each request but the probe."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readuntil(b"\r\n\r\n")
        if not first.startswith(b"GET / "):
            await asyncio.sleep(0.6)
        writer.write(self.response)
        writer.close()


@asynccontextmanager
async def fleet(*replicas: StubReplica, library: Any = httpx) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        addresses = []
        for replica in replicas:
            server = await asyncio.start_server(replica.handle, "127.0.0.1", 0)
            stack.callback(server.close)
            host, port = server.sockets[0].getsockname()
            addresses.append(f"{host}:{port}")
        router = Router(InTurn(*addresses), LIMITS, silence_s=0.1, probe_timeout_s=1.0)
        stack.push_async_callback(router.close)
        transport = library.ASGITransport(app=router)
        yield await stack.enter_async_context(
            library.AsyncClient(transport=transport, base_url="http://fleet", timeout=10)
        )


@pytest.mark.slow
async def test_a_request_at_a_replica_that_is_stopped_goes_to_another_one() -> None:
    async with fleet(Stops(b"", at_once=True), StubReplica(OK)) as client:
        assert (await asyncio.wait_for(client.get("/v1/models"), 5)).text == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    "begun", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nonly"]
)
async def test_so_does_one_whose_answer_had_begun_and_was_not_forwarded(begun: bytes) -> None:
    async with fleet(Stops(begun), StubReplica(OK)) as client:
        assert (await asyncio.wait_for(client.get("/v1/models"), 5)).text == "ok"


@pytest.mark.slow
async def test_a_stream_that_was_forwarded_ends_with_an_error() -> None:
    async with fleet(Stops(BEGUN)) as client:
        answer = await asyncio.wait_for(client.get("/v1/models"), 5)
    assert answer.text.startswith("one") and "the replica that streamed this answer was lost" in answer.text


@pytest.mark.slow
@pytest.mark.parametrize("torn", ["", "event: content_bl", 'event: content_block_delta\ndata: {"type": "con'])
async def test_anthropics_client_learns_that_an_answer_was_cut_off(torn: str) -> None:
    import anthropic

    event = 'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0}\n\n' + torn
    chunk = f"{len(event):x}\r\n{event}\r\n".encode()
    async with fleet(Stops(BEGUN.replace(b"3\r\none\r\n", chunk)), library=httpx2) as http:
        client = anthropic.AsyncAnthropic(
            api_key="k", base_url="http://fleet", http_client=http, max_retries=0
        )
        question: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
        events = []
        with pytest.raises((anthropic.APIStatusError, ValueError), match=r"was lost|JSON|Unterminated"):
            async for each in await client.messages.create(**question, stream=True):
                events.append(each.type)
    assert events == ["content_block_delta"]


@pytest.mark.slow
async def test_a_replica_that_takes_its_time_is_waited_for() -> None:
    async with fleet(Slow(OK), Stops(b"")) as client:
        assert (await asyncio.wait_for(client.get("/v1/models"), 5)).text == "ok"


async def test_a_replica_is_asked_once_for_all_who_wait() -> None:
    asked = []

    async def ask(address: str, key: str) -> bool:
        asked.append(address)
        await asyncio.sleep(0.01)
        return True

    probes = Probes(ask)
    assert await asyncio.gather(*(probes.alive("a", "k") for _ in range(5))) == [True] * 5
    assert asked == ["a"] and await probes.alive("a", "k") and asked == ["a", "a"]


@pytest.mark.slow
async def test_whoever_hears_something_does_not_ask() -> None:
    given_up: list[None] = []

    async def alive() -> bool:
        return False

    patience = Patience(alive, lambda: given_up.append(None), 0.1)
    answer = SimpleNamespace(heard_at=0.0)
    patience.follow(answer)
    for _ in range(8):
        answer.heard_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.03)
    assert given_up == []
    await asyncio.sleep(0.3)
    assert given_up == [None]
    patience.close()


def test_the_options_of_a_connection_are_known_to_the_system() -> None:
    assert hasattr(socket, "TCP_USER_TIMEOUT")
