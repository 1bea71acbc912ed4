import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from unittest.mock import AsyncMock

import aiohttp
import pytest
from fastapi import FastAPI
from prometheus_client import Gauge
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
from vllm.v1.metrics.prometheus import get_prometheus_registry

from deployments.calls.http_server import HttpServer
from deployments.protocol.routing import ReplicaEndpoint
from deployments.replica.http_front import ReplicaFront
from deployments.router.scrape import scrape
from tests.deployments.routed_fleet import service


@asynccontextmanager
async def servers(*answers: bytes | None) -> AsyncIterator[dict[str, ReplicaEndpoint]]:
    """Servers that send these bytes; None: nothing at all."""

    def handler(answer: bytes | None) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readuntil(b"\r\n\r\n")
            assert asked.startswith(b"GET /metrics ") and b"x-slipstream-key: k" in asked
            if answer is None:
                await reader.read()  # until the other side gives up
            else:
                writer.write(answer)
                await writer.drain()
            writer.close()

        return handle

    async with AsyncExitStack() as stack:
        endpoints = {}
        for index, answer in enumerate(answers):
            server = await asyncio.start_server(handler(answer), "127.0.0.1", 0)  # type: ignore[arg-type]
            stack.callback(server.close)
            host, port = server.sockets[0].getsockname()
            endpoints[f"r{index}"] = ReplicaEndpoint(address=f"{host}:{port}", key="k")
        yield endpoints


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\na 1\n"
FAILED = OK.replace(b"200 OK", b"500 no")
ENDLESS = b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\na 1\n"


@pytest.mark.slow
async def test_those_that_answer_in_time_are_there_and_the_others_are_named() -> None:
    async with servers(OK, None, FAILED, ENDLESS) as endpoints, aiohttp.ClientSession() as session:
        endpoints["gone"] = ReplicaEndpoint(address="127.0.0.1:9", key="k")  # no listener there
        async with asyncio.timeout(20):
            scraped = await scrape(session, endpoints, timeout_s=2.0)
    assert scraped.replicas == {"r0": "a 1\n", "r1": None, "r2": None, "r3": None, "gone": None}
    assert scraped.nodes == {}, "there is no cluster here"


async def test_vllm_is_asked_for_some_metrics_alone() -> None:
    registry = get_prometheus_registry()
    made = [Gauge(name, "", registry=registry) for name in ("vllm:wanted", "vllm:other")]
    app = FastAPI()
    attach_router(app)  # vLLM's
    front = ReplicaFront(app, replica_id="a", admit=AsyncMock(), refusal=lambda: "asleep", version=lambda: 0)
    server = HttpServer(front, "127.0.0.1")
    try:
        async with aiohttp.ClientSession() as session:
            endpoint = ReplicaEndpoint(address=server.address, key=front.key)
            (text,) = (await scrape(session, {"a": endpoint}, ["vllm:wanted"])).replicas.values()
    finally:
        await server.close()
        for each in made:
            registry.unregister(each)
    assert text is not None and "vllm:wanted 0.0" in text and "vllm:other" not in text


async def test_router_asks_all_replicas_also_those_that_refuse_requests() -> None:
    async with service("a", "b") as (fleet, router, _):
        fleet.engines["b"].refusal = "being stopped"
        scraped = await router.metrics()
        assert scraped.replicas == {"a": "running 0\n", "b": "running 0\n"}, "a scrape is no request"
