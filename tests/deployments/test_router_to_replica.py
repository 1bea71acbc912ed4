"""The replica's front on its own server, and the router in front of two of them: real connections,
only Serve's choice of a replica is a fake."""

import asyncio
import json

import pytest

from tests.deployments.routed_fleet import SPANS, Fleet, service
from tests.waiting import reached


async def test_answer_passes_through_and_gains_versions() -> None:
    async with service("a") as (_, router, client):
        tokens = {"authorization": "Bearer secret", "x-api-key": "secret", "cookie": "secret"}
        answer = await client.post("/whole?q=%20x", content=b"hello", headers=tokens)
        assert answer.json() == {
            "choices": [{"index": 0, "finish_reason": "length", "weight_versions": SPANS}],
            "seen": {"body": "hello", "query": "q=%20x", "path": "/whole"},
            "weight_version": 7,
        }
        assert answer.headers["x-slipstream-replica"] == "a" and answer.headers["x-weight-version"] == "7"
        text = await client.get("/text")
        assert (text.text, text.headers["x-own"], text.headers["x-weight-version"]) == ("plain", "kept", "6")
        assert (await client.get("/nothing")).status_code == 404
        assert router.in_flight == 0


async def test_stream_arrives_as_it_is_made_and_its_last_event_has_the_versions() -> None:
    async with service("a") as (_, router, client):
        pieces = []
        async with client.stream("GET", "/stream?events=5") as answer:
            assert answer.headers["x-weight-version"] == "6"
            async for piece in answer.aiter_raw():
                pieces.append(piece)
        assert len(pieces) > 2, "the events must not wait for the last one"
        last = b"".join(pieces).split(b"\n\n")[-2]
        assert b'"weight_version":7' in last and b'"weight_versions":[{"version":7' in last
        assert router.in_flight == 0


async def test_client_disconnect_aborts_the_request_and_frees_its_place() -> None:
    async with service("a") as (fleet, router, client):
        async with client.stream("GET", "/stream?events=1000") as answer:
            await anext(answer.aiter_raw())
            assert router.in_flight == 1
        await reached(lambda: fleet.engines["a"].left == 1 and router.in_flight == 0)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/die", "/die-in-stream", "/die-in-stream?named=1"])
async def test_request_that_kills_engines_kills_two_at_most(path: str) -> None:
    async with service("a", "b", "c") as (fleet, _, client):
        # The engine of whoever is asked first dies of it, and says so; the next one's dies as well.
        answer = await client.post(path, content=b"deadly")
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (422, "deadly_request")
        assert len(set(error["detail"]["replicas"])) == 2
        for _ in range(3):
            assert (await client.post(path, content=b"deadly")).status_code == 422
        assert sum(len(engine.asked) for engine in fleet.engines.values()) == 2
        assert (await client.post("/whole", content=b"harmless")).status_code == 200


@pytest.mark.slow
async def test_request_that_kills_engines_in_mid_stream_kills_two_at_most() -> None:
    async with service("a", "b", "c") as (fleet, _, client):
        for _ in range(2):
            cut = await client.post("/die-late", content=b"deadly")
            first, error = filter(None, cut.text.split("\n\n"))
            assert first == 'data: {"n": 0, "choices": []}'
            assert json.loads(error.removeprefix("data: "))["error"]["type"] == "replica_unavailable"
        for _ in range(3):
            answer = await client.post("/die-late", content=b"deadly")
            assert (answer.status_code, answer.json()["error"]["type"]) == (422, "deadly_request")
        assert sum(len(engine.asked) for engine in fleet.engines.values()) == 2
        assert (await client.post("/whole", content=b"harmless")).status_code == 200


@pytest.mark.parametrize("in_order", [True, False])
async def test_graceful_shutdown_hands_requests_over_without_a_loss_and_a_failure_is_one(
    in_order: bool,
) -> None:
    async with service("a", "b", "c") as (fleet, _, client):
        asked = asyncio.ensure_future(client.post("/late", content=b"long"))
        for _ in range(2):
            name = await _asked(fleet)
            fleet.engines[name].refusal = "it is being stopped" if in_order else "fenced: for a test"
            fleet.engines[name].asked.clear()
            fleet.fronts[name].stop(in_order=in_order)
        if in_order:
            fleet.engines[await _asked(fleet)].lives.set()
        assert (await asked).status_code == (200 if in_order else 422)


@pytest.mark.parametrize("path", ["/long", "/long?raises=1", "/long?named=1"])
async def test_stream_cut_off_by_graceful_shutdown_is_no_loss(path: str) -> None:
    async with service("a", "b", "c") as (fleet, router, client):
        for _ in range(2):
            async with client.stream("POST", path, content=b"long") as answer:
                pieces = answer.aiter_raw()
                text = await anext(pieces)
                name = answer.headers["x-slipstream-replica"]
                fleet.engines[name].refusal = "it is being stopped"
                fleet.fronts[name].stop(in_order=True)
                fleet.engines[name].lives.set()
                text += b"".join([piece async for piece in pieces])
            _, last, end = text.split(b"\n\n")
            name, _, data = last.rpartition(b"data: ")
            assert name == (b"event: error\n" if "named" in path else b"")
            error = json.loads(data)["error"]
            assert error["type"] == "replica_unavailable" and "is being stopped" in error["message"]
            assert end == b""
        for engine in fleet.engines.values():
            engine.lives.set()
        assert (await client.post(path, content=b"long")).text.endswith("data: [DONE]\n\n")
        assert len(router._forwarder.deadly) == 0


async def _asked(fleet: Fleet) -> str:
    """The replica whose engine has a request."""
    async with asyncio.timeout(5):
        while True:
            for name, engine in fleet.engines.items():
                if engine.asked:
                    return name
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_refused_request_is_sent_to_another_replica() -> None:
    async with service("a", "b") as (fleet, _, client):
        fleet.engines["a"].refusal = "being stopped"
        for _ in range(8):
            answer = await client.post("/whole", content=b"x")
            assert answer.headers["x-slipstream-replica"] == "b"
        fleet.engines["b"].refusal = "fenced: for a test"
        answer = await client.post("/whole", content=b"x")
        assert answer.status_code == 503
        fleet.engines["a"].refusal = None
        assert (await client.post("/whole", content=b"x")).headers["x-slipstream-replica"] == "a"


async def test_demand_that_is_not_met_is_a_conflict() -> None:
    async with service("a") as (_, _, client):
        answer = await client.get("/text", headers={"x-min-weight-version": "8"})
        assert answer.status_code == 409 and answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["detail"] == {"waited_s": 1.0}, "the router's own limit"
        answer = await client.get("/text", headers={"x-min-weight-version": "8", "x-weight-timeout": "0.5"})
        assert answer.json()["error"]["detail"]["waited_s"] == 0.5
        answer = await client.get("/text", headers={"x-min-weight-version": "new"})
        assert answer.status_code == 400 and "'new'" in answer.json()["error"]["message"]
