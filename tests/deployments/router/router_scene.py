"""A router in front of replicas that are sockets and send canned bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import httpx

from deployments.protocol.routing import Demand
from deployments.router.forwarding import RouterLimits
from deployments.router.router import Router
from tests.deployments.recorded import Recorded

LIMITS = RouterLimits(max_ongoing_requests=8, max_body_bytes=1000, request_timeout_s=10.0)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
REASON = b'{"error": {"message": "it sleeps"}}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
    b"x-slipstream-refused: not-begun\r\ncontent-length: %d\r\n\r\n%b" % (len(REASON), REASON)
)
ENGINE_LOST = REFUSAL.replace(b"not-begun", b"lost")
TRUNCATED = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this"
NOTHING = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    first_line: str
    headers: dict[str, str]
    body: bytes


class StubReplica:
    """A server that reads a request, sends canned bytes and closes the connection."""

    def __init__(self, response: bytes) -> None:
        self.response = response
        self.works_s = 0.0  # before it answers
        self.received: list[Received] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.received.append(Received(first_line=first_line, headers=headers, body=body))
        await asyncio.sleep(self.works_s)
        writer.write(self.response)
        await writer.drain()
        writer.close()


class FakeHandle:
    """Stands for Serve's handle: chooses the replicas in turn."""

    def __init__(self) -> None:
        self.metadata: dict[str, dict[str, str]] = {}
        self.demands: list[Demand] = []
        self.error: Exception | None = None
        self.ready = asyncio.Event()
        self.ready.set()

    @asynccontextmanager
    async def choose_replica(self, demand: Demand, *, _reserve: bool) -> AsyncIterator[Any]:
        self.demands.append(demand)
        if self.error is not None:
            raise self.error
        chosen = list(self.metadata)[(len(self.demands) - 1) % len(self.metadata)]
        await self.ready.wait()
        yield SimpleNamespace(replica_id=chosen, replica_metadata=self.metadata[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    handle: FakeHandle
    router: Router
    client: httpx.AsyncClient
    replicas: list[StubReplica]
    recorded: Recorded


@asynccontextmanager
async def scene(
    *responses: bytes | StubReplica, timeout_s: float = 10.0, library: Any = httpx, **options: float
) -> AsyncIterator[Scene]:
    """A router with these options in front of replicas; a client of `library`, which is as `httpx`."""
    handle = FakeHandle()
    recorded = Recorded()
    router = Router(handle, replace(LIMITS, request_timeout_s=timeout_s), record=recorded, **options)
    replicas = [StubReplica(each) if isinstance(each, bytes) else each for each in responses]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.close)
        for index, replica in enumerate(replicas):
            server = await asyncio.start_server(replica.handle, "127.0.0.1", 0)
            stack.callback(server.close)
            host, port = server.sockets[0].getsockname()
            handle.metadata[f"r{index}"] = {"address": f"{host}:{port}", "key": f"key-{index}"}
        transport = library.ASGITransport(app=router)
        client = library.AsyncClient(transport=transport, base_url="http://fleet", timeout=10)
        await stack.enter_async_context(client)
        yield Scene(handle=handle, router=router, client=client, replicas=replicas, recorded=recorded)
