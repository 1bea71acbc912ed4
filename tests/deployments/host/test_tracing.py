"""Spans across our own calls, with an exporter in memory; tests/fleet/test_launched.py has a whole fleet."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import Message, Receive, Send

from deployments.calls.rpc import CallHandle, CallServer
from deployments.host import tracing
from deployments.protocol.poll import Directive, Instruction, Report, Verify
from deployments.protocol.routing import KEY_HEADER, Demand
from deployments.replica.follower import Follower
from deployments.replica.http_front import ReplicaFront
from tests.deployments.replica.scripted_member import Member, Script

CLIENT = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # it can be set once in a process
    monkeypatch.setattr(tracing, "ENABLED", True)
    tracing._tracer.cache_clear()
    yield exporter
    tracing._tracer.cache_clear()


class Controller:
    async def open_round(self) -> dict[str, str]:
        return tracing.headers()


async def call_under(parent: dict[str, str] | None) -> dict[str, str]:
    server = CallServer(Controller(), lambda: "127.0.0.1")
    try:
        with tracing.span("publish", parent, round=3):
            answer: dict[str, str] = await CallHandle(await server.address()).open_round.remote()
            return answer
    finally:
        await server.aclose()


async def test_a_call_is_below_the_span_that_made_it(exported: InMemorySpanExporter) -> None:
    below = await call_under(CLIENT)
    called, calling = exported.get_finished_spans()
    assert (called.name, calling.name, dict(calling.attributes or {})) == (
        "open_round",
        "publish",
        {"round": 3},
    )
    assert called.parent is not None and calling.parent is not None
    assert called.parent.span_id == calling.context.span_id
    assert (calling.parent.trace_id, calling.parent.span_id) == (int("a" * 32, 16), int("b" * 16, 16))
    assert below["traceparent"] == f"00-{'a' * 32}-{called.context.span_id:016x}-01"


async def test_a_call_without_a_trace_has_no_span(exported: InMemorySpanExporter) -> None:
    assert await call_under(None) == {} and exported.get_finished_spans() == ()


def test_serve_and_vllm_are_told_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing.serve_variables({}) == {} == tracing.engine_arguments()
    given = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}
    path = tracing.serve_variables(given)["RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH"]
    module, function = path.split(":")
    assert getattr(sys.modules[module], function) is tracing.span_processors
    monkeypatch.setattr(tracing, "ENABLED", True)
    monkeypatch.setenv(*next(iter(given.items())))
    assert tracing.engine_arguments() == {"otlp_traces_endpoint": "http://collector:4318/v1/traces"}


def test_nothing_is_imported_where_it_is_off() -> None:
    program = (
        "import sys; from deployments.host import tracing\n"
        "with tracing.span('a', {'traceparent': 'b'}): assert tracing.headers() == {}\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)


async def test_what_vllm_gets_is_below_the_replica(exported: InMemorySpanExporter) -> None:
    got: list[dict[bytes, bytes]] = []

    async def vllm(scope: Message, receive: Receive, send: Send) -> None:
        got.append(dict(scope["headers"]))

    async def ready(demand: Demand) -> None:
        pass

    front = ReplicaFront(
        vllm,
        replica_id="r0",
        admit=ready,
        refusal=lambda: None,
        version=lambda: 3,
        require_passed=lambda method, path: None,
    )
    sent = {KEY_HEADER: front.key.encode(), b"traceparent": CLIENT["traceparent"].encode(), b"x": b"1"}
    await front({"type": "http", "method": "POST", "path": "/", "headers": [*sent.items()]}, None, None)  # type: ignore[arg-type]
    (replica,) = exported.get_finished_spans()
    assert (replica.name, dict(replica.attributes or {})) == ("replica", {"replica": "r0"})
    below = f"00-{'a' * 32}-{replica.context.span_id:016x}-01".encode()
    assert got == [sent | {b"traceparent": below}]


async def test_a_replica_works_in_the_trace_that_opened_the_round(exported: InMemorySpanExporter) -> None:
    member = Member("")
    script = Script([Instruction(seq=1, body=Verify(round_id=4), deadline_s=5.0)])

    async def poll(report: Report) -> Directive:
        return replace(await script(report), trace=CLIENT)

    follower = Follower(replica_id="r0", incarnation="i", member=member, poll=poll, heartbeat_s=0.02)
    await asyncio.wait_for(follower.run(), 10)
    (verify,) = exported.get_finished_spans()
    assert (verify.name, dict(verify.attributes or {})) == ("verify", {"replica": "r0", "round": 4})
    assert verify.context.trace_id == int("a" * 32, 16)
