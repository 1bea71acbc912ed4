"""What the router sends to a replica and returns from it, and what it does when that fails.

The router in front of real replica fronts is tested in `tests/deployments/test_router_to_replica.py`.
"""

import asyncio
from dataclasses import replace

import pytest
from ray.serve.exceptions import BackPressureError

from deployments.protocol.errors import DeadlyRequest, FleetUnavailable, InvalidRequest
from deployments.router.forwarding import RETRY_AFTER_S, WAITED_S
from deployments.serve.instruments import REQUESTS, REROUTED, WAITED, WAITED_SECONDS
from tests.deployments.router.router_scene import ENGINE_LOST, LIMITS, NOTHING, OK, REFUSAL, TRUNCATED, scene
from tests.waiting import reached


async def test_request_is_forwarded_as_it_is_without_the_headers_of_its_connection() -> None:
    async with scene(OK) as fleet:
        headers = {"x-own": "1", "te": "trailers", "x-slipstream-key": "guess", "expect": "100-continue"}
        answer = await fleet.client.post("/v1/a%20b?q=%2F", content=b"hello", headers=headers)
        assert (answer.status_code, answer.text) == (200, "ok")
        (received,) = fleet.replicas[0].received
        assert received.first_line == "POST /v1/a%20b?q=%2F HTTP/1.1"
        assert received.body == b"hello"
        assert received.headers["x-own"] == "1"
        assert received.headers["x-slipstream-key"] == "key-0", "the client's guess is replaced"
        assert received.headers["x-weight-timeout"] == "10.0", "the router's default"
        assert received.headers["host"] == fleet.handle.metadata["r0"]["address"]
        assert not {"te", "expect", "connection"} & received.headers.keys()


async def test_response_keeps_its_own_headers_and_loses_those_of_its_connection() -> None:
    response = (
        b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /elsewhere\r\nset-cookie: a=1\r\nset-cookie: b=2\r\n"
        b"date: today\r\nserver: uvicorn\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    )
    async with scene(response) as fleet:
        answer = await fleet.client.get("/")
        assert answer.status_code == 307, "not followed by the router"
        assert answer.headers.multi_items() == [
            ("location", "/elsewhere"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("content-length", "0"),
        ]


@pytest.mark.parametrize("failure", [REFUSAL, ENGINE_LOST, TRUNCATED, NOTHING])
async def test_replica_death_before_first_byte_is_retried(failure: bytes) -> None:
    async with scene(failure, OK) as fleet:
        answer = await fleet.client.post("/x", content=b"again")
        assert (answer.status_code, answer.text) == (200, "ok")
        assert [each.received[0].body for each in fleet.replicas] == [b"again", b"again"]
        assert [demand.refused for demand in fleet.handle.demands] == [(), ("r0",)]
        assert fleet.router.in_flight == 0


async def test_when_every_replica_refuses_the_last_reason_is_in_the_answer() -> None:
    async with scene(REFUSAL, timeout_s=0.2) as fleet:
        with pytest.raises(FleetUnavailable, match=r"within 0\.2 s: it sleeps$") as raised:
            await fleet.client.get("/")
        assert raised.value.detail == {"retry_after_s": RETRY_AFTER_S}
        assert fleet.router.in_flight == 0


async def test_back_pressure_of_serve_is_a_reason_to_try_again() -> None:
    async with scene(OK, timeout_s=0.1) as fleet:
        fleet.handle.error = BackPressureError(num_queued_requests=5, max_queued_requests=5)
        with pytest.raises(FleetUnavailable, match=r"within 0\.1 s: BackPressureError: "):
            await fleet.client.get("/")
        fleet.handle.error = None
        assert (await fleet.client.get("/")).text == "ok"


async def test_requests_are_counted_by_outcome_and_by_what_was_tried() -> None:
    async with scene(REFUSAL, OK) as fleet:
        await fleet.client.get("/")
        await fleet.client.get("/")
        with pytest.raises(InvalidRequest):
            await fleet.client.get("/", headers={"x-min-weight-version": "soon"})
        fleet.router.limits = replace(LIMITS, max_ongoing_requests=0)
        with pytest.raises(FleetUnavailable):
            await fleet.client.get("/")
        recorded = fleet.recorded
        outcomes = {name: len(found) for name, found in recorded.values(REQUESTS, "outcome").items()}
        assert outcomes == {"answered": 2, "invalid_request": 1, "busy": 1}
        tried = len(fleet.replicas[0].received)
        assert recorded.values(REROUTED, "reason") == {"refused": [1.0] * tried}


async def test_requests_that_waited_for_a_replica_are_counted_with_their_time() -> None:
    async with scene(OK) as fleet:
        assert (await fleet.client.get("/")).text == "ok"
        assert fleet.recorded.values(WAITED) == {}
        fleet.handle.error = BackPressureError(num_queued_requests=5, max_queued_requests=5)
        waiting = asyncio.create_task(fleet.client.get("/"))
        await asyncio.sleep(WAITED_S + 0.1)
        fleet.handle.error = None
        assert (await waiting).text == "ok"
        ((waited_s,),) = fleet.recorded.values(WAITED_SECONDS).values()
        assert waited_s > WAITED_S and fleet.recorded.values(WAITED) == {None: [1.0]}


@pytest.mark.parametrize("loss", [ENGINE_LOST, TRUNCATED, NOTHING])
async def test_request_that_lost_two_replicas_reaches_no_third(
    loss: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(loss, loss, OK) as fleet:
        with pytest.raises(DeadlyRequest, match=r"2 replicas were lost under this request \(r0, r1\)"):
            await fleet.client.post("/v1/completions", content=b"deadly")
        with pytest.raises(DeadlyRequest, match="refused for 600 s"):  # a client that repeats it
            await fleet.client.post("/v1/completions?again=1", content=b"deadly")
        assert [len(replica.received) for replica in fleet.replicas] == [1, 1, 0]
        assert (await fleet.client.post("/v1/completions", content=b"harmless")).text == "ok"
        assert fleet.router.in_flight == 0
    (line,) = caplog.messages
    assert line.startswith(
        "POST /v1/completions is refused: 2 replicas were lost under this request (r0, r1)"
    )


async def test_a_dead_replica_that_is_still_routed_to_is_no_second_loss() -> None:
    """The only one, until Serve has replaced it."""
    async with scene(ENGINE_LOST, OK) as fleet:
        dead, routed = fleet.replicas[0], fleet.handle.metadata
        successor = {"r1": routed.pop("r1")}
        post = asyncio.create_task(fleet.client.post("/x", content=b"harmless"))
        await reached(lambda: post.done() or len(fleet.handle.demands) >= 3)
        fleet.handle.metadata = successor
        assert (await post).text == "ok" and len(dead.received) == 1


async def test_replica_death_under_many_requests_retries_all() -> None:
    async with scene(NOTHING, OK) as fleet:
        killed, intact = fleet.replicas
        killed.works_s = 0.1
        count = LIMITS.max_ongoing_requests
        posts = asyncio.gather(*[fleet.client.post("/x", content=b"the same") for _ in range(count)])
        await reached(lambda: len(killed.received) >= count // 2)
        del fleet.handle.metadata["r0"]  # Serve has noticed
        assert [answer.text for answer in await posts] == ["ok"] * count
        assert len(intact.received) == count


async def test_attempts_that_reached_no_engine_are_not_counted() -> None:
    async with scene(*[REFUSAL] * 3, NOTHING, *[REFUSAL] * 3, OK) as fleet:
        fleet.handle.metadata["r1"]["address"] = "127.0.0.1:9"  # no listener there
        assert (await fleet.client.post("/x", content=b"again")).text == "ok"


async def test_waiting_request_is_refused_once_an_identical_one_was() -> None:
    async with scene(NOTHING, NOTHING, OK) as fleet:
        fleet.replicas[1].works_s = 0.1
        first = asyncio.ensure_future(fleet.client.post("/x", content=b"deadly"))
        await reached(lambda: bool(fleet.replicas[1].received))
        fleet.handle.ready.clear()
        twin = asyncio.ensure_future(fleet.client.post("/x", content=b"deadly"))
        with pytest.raises(DeadlyRequest, match="2 replicas"):
            await first
        assert len(fleet.handle.demands) == 3 and not twin.done(), "it waits for a replica"
        fleet.handle.ready.set()
        with pytest.raises(DeadlyRequest, match="refused for 600 s"):
            await twin
        assert fleet.replicas[2].received == []


@pytest.mark.slow
async def test_time_of_a_lost_response_is_no_search_time() -> None:
    async with scene(NOTHING, OK, timeout_s=0.3) as fleet:
        fleet.replicas[0].works_s = 0.6
        assert (await fleet.client.post("/x", content=b"long")).text == "ok"


@pytest.mark.slow
async def test_a_wait_for_a_version_is_no_search_time_and_goes_on_at_another_replica() -> None:
    async with scene(REFUSAL, OK, timeout_s=0.3) as fleet:
        fleet.replicas[0].works_s = 0.6
        headers = {"x-min-weight-version": "8", "x-weight-timeout": "5"}
        assert (await fleet.client.post("/x", headers=headers)).text == "ok"
        first, second = (float(each.received[0].headers["x-weight-timeout"]) for each in fleet.replicas)
        assert first == pytest.approx(5.0, abs=0.3) and 3.0 < second <= 4.4


@pytest.mark.slow
async def test_search_time_counts_again_after_a_loss() -> None:
    async with scene(NOTHING, *[REFUSAL] * 20, timeout_s=0.3) as fleet:
        fleet.replicas[0].works_s = 0.6
        with pytest.raises(FleetUnavailable, match=r"it sleeps$"):
            await fleet.client.post("/x", content=b"long")
        assert 2 < len(fleet.handle.demands) < 10
