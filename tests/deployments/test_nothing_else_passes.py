"""Bytes on a socket, at the router's port and at the replica's: only what is listed reaches the engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from app.http.auth import Guard
from app.http.ingress import build_app
from app.settings.security import Tokens
from deployments.calls.http_server import HttpServer
from deployments.protocol.routing import Demand
from deployments.replica.http_front import ReplicaFront
from deployments.router.router import Router
from tests.deployments.router.router_scene import LIMITS, FakeHandle


class Engine:
    """Answers everything, and remembers what reached it."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append((scope["method"], scope["path"]))
        await PlainTextResponse("reached")(scope, receive, send)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    engine: Engine
    router: str
    replica: str
    key: str


@asynccontextmanager
async def ports() -> AsyncIterator[Ports]:
    async def admit(demand: Demand) -> None:
        return

    engine = Engine()
    front = ReplicaFront(engine, replica_id="r", admit=admit, refusal=lambda: None, version=lambda: 1)
    async with AsyncExitStack() as stack:
        replica = HttpServer(front, "127.0.0.1")
        stack.push_async_callback(replica.close)
        handle = FakeHandle()
        handle.metadata["r"] = {"address": replica.address, "key": front.key}
        router = Router(handle, LIMITS)
        stack.push_async_callback(router.close)
        ingress = HttpServer(build_app(Guard(Tokens()), router, None, scrape=router.metrics), "127.0.0.1")
        stack.push_async_callback(ingress.close)
        yield Ports(engine=engine, router=ingress.address, replica=replica.address, key=front.key)


async def status_of(address: str, method: str, target: str, *headers: str) -> int:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [f"{method} {target} HTTP/1.1", "host: fleet", "content-length: 0", "connection: close", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
    try:
        return int((await asyncio.wait_for(reader.read(), 5)).split()[1])
    finally:
        writer.close()


TARGETS = [
    "/collective_rpc",
    "//collective_rpc",
    "/%63ollective_rpc",
    "/%2563ollective_rpc",
    "/v1/../collective_rpc",
    "/v1/%2e%2e/collective_rpc",
    "/v1/completions/../../collective_rpc",
    "/v1/completions%2f..%2f..%2fcollective_rpc",
    "/v1/responses/x%2f..%2f..%2f..%2fcollective_rpc",
    "/v1/responses/..%2f..%2fcollective_rpc/cancel",
    "/collective_rpc/",
    "/collective_rpc;x",
    "/collective_rpc%00",
    "/COLLECTIVE_RPC",
    "/scale_elastic_ep",
    "/v1/load_lora_adapter",
    "/adapters",
    "/start_profile",
    "/update_weights",
    "http://fleet/collective_rpc",
    "/v1/realtime",
    "*",
]


@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS", "DELETE", "HEAD"])
async def test_no_spelling_reaches_a_route_that_is_not_on_the_list(method: str) -> None:
    async with ports() as fleet:
        for target in TARGETS:
            for address in (fleet.router, fleet.replica):
                status = await status_of(address, method, target, f"x-slipstream-key: {fleet.key}")
                assert status in (400, 404, 405), (target, address)
        assert fleet.engine.reached == []


@pytest.mark.parametrize(
    "header", ["x-http-method-override: POST", "x-method-override: POST", "x-original-url: /collective_rpc"]
)
async def test_no_header_makes_another_request_of_it(header: str) -> None:
    async with ports() as fleet:
        assert await status_of(fleet.router, "GET", "/v1/completions", header) == 405
        assert await status_of(fleet.router, "GET", "/v1/models", header) == 200
        assert fleet.engine.reached == [("GET", "/v1/models")]


async def test_websocket_is_refused_at_both_ports() -> None:
    upgrade = (
        "upgrade: websocket",
        "connection: upgrade",
        "sec-websocket-version: 13",
        "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
    )
    async with ports() as fleet:
        for path in ("/v1/realtime", "/collective_rpc"):
            for address in (fleet.router, fleet.replica):
                status = await status_of(address, "GET", path, f"x-slipstream-key: {fleet.key}", *upgrade)
                assert status in (403, 404)
        assert fleet.engine.reached == []


async def test_replicas_port_is_for_those_who_know_the_fleets_key() -> None:
    async with ports() as fleet:
        assert await status_of(fleet.replica, "GET", "/v1/models") == 400
        assert await status_of(fleet.replica, "GET", "/v1/models", "x-slipstream-key: guess") == 400
        assert fleet.engine.reached == []
        assert await status_of(fleet.replica, "GET", "/v1/models", f"x-slipstream-key: {fleet.key}") == 200
