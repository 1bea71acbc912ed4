"""A replica that is stopped, or cut off, keeps its connections open and says nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import pytest

from deployments.router.forwarding import detect_stall
from tests.deployments.router.router_scene import OK, StubReplica, scene

BEGUN = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n"
)


class Stops(StubReplica):
    """Begins to answer, and stops with everything that it does."""

    _stopped = False

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

    probes = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readuntil(b"\r\n\r\n")
        self.probes += first.startswith(b"GET / ")
        if not first.startswith(b"GET / "):
            await asyncio.sleep(0.6)
        writer.write(self.response)
        writer.close()


@asynccontextmanager
async def fleet(*replicas: StubReplica, library: Any = httpx) -> AsyncIterator[Any]:
    async with scene(*replicas, library=library, silence_s=0.1, probe_timeout_s=1.0) as made:
        yield made.client


@pytest.mark.slow
@pytest.mark.parametrize(
    "begun", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nonly"]
)
async def test_stall_before_the_first_forwarded_byte_is_retried(begun: bytes) -> None:
    async with fleet(Stops(begun), StubReplica(OK)) as client:
        assert (await asyncio.wait_for(client.get("/v1/models"), 5)).text == "ok"


@pytest.mark.slow
async def test_stalled_stream_ends_with_an_error_event() -> None:
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
async def test_slow_replica_that_answers_probes_is_waited_for() -> None:
    async with fleet(Slow(OK), Stops(b"")) as client:
        assert (await asyncio.wait_for(client.get("/v1/models"), 5)).text == "ok"


@pytest.mark.slow
async def test_response_that_stalls_is_given_up_and_one_that_progresses_is_not() -> None:
    given_up: list[str] = []
    response: Any = SimpleNamespace(heard_at=asyncio.get_running_loop().time(), give_up=given_up.append)

    async def is_alive() -> bool:
        return False

    stall = asyncio.create_task(detect_stall(response, is_alive, 0.1))
    for _ in range(8):
        response.heard_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.03)
    assert given_up == []
    await asyncio.wait_for(stall, 5)
    assert len(given_up) == 1


@pytest.mark.slow
async def test_requests_that_wait_for_one_replica_share_a_probe() -> None:
    replica = Slow(OK)
    async with fleet(replica) as client:
        await asyncio.gather(*(client.get("/v1/models") for _ in range(5)))
    assert replica.probes < 2 * 0.6 / 0.1
