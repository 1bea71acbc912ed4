"""Pause, sleep and the like: every parameter reaches the controller as an operation."""

import httpx
import pytest

from deployments.protocol.engine_state import (
    AbortRequests,
    InFlight,
    Operation,
    Pause,
    ResetPrefixCache,
    Sleep,
    SleepTag,
    WakeUp,
)
from tests.app.http.fake_controller import FakeController

OPERATIONS: list[tuple[str, bytes, Operation]] = [  # `test_same_as_vllm` has what vLLM itself accepts
    ("/pause?mode=keep&mode=wait", b"", Pause(mode=InFlight.WAIT)),
    (
        "/wake_up?tags=kv_cache&tags=weights&tags=kv_cache",
        b"",
        WakeUp(tags=(SleepTag.KV_CACHE, SleepTag.WEIGHTS)),
    ),
    ("/sleep", b'{"level": 2}', Sleep(level=2)),  # SkyRL
    ("/sleep?level=1", b'{"level": 2}', Sleep(level=1)),
    ("/sleep?mode=wait", b'{"level": 0}', Sleep(level=0, mode=InFlight.WAIT)),
    ("/wake_up", b'{"tags": ["weights"]}', WakeUp(tags=(SleepTag.WEIGHTS,))),  # SkyRL
    ("/wake_up?tags=kv_cache", b'{"tags": ["weights"]}', WakeUp(tags=(SleepTag.KV_CACHE,))),
    (
        "/reset_prefix_cache",
        b'{"reset_running_requests": true}',  # SkyRL
        ResetPrefixCache(reset_running_requests=True),
    ),
    (
        "/reset_prefix_cache?reset_running_requests=1",
        b'{"reset_external": true, "model": "m"}',
        ResetPrefixCache(reset_running_requests=True, reset_connector=True),
    ),
    ("/abort_requests", b'{"request_ids": []}', AbortRequests(request_ids=())),
]


@pytest.mark.parametrize(("path", "content", "operation"), OPERATIONS)
async def test_parameters_in_query_and_body_become_an_operation(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, content: bytes, operation: Operation
) -> None:
    assert (await fleet.post(path, content=content)).status_code == 200
    assert controller.operations == [operation]


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("/pause?mode=nap", b"", "mode: expected 'keep', 'wait' or 'abort', got 'nap'"),
        ("/sleep?level=3", b"", "level: expected less than or equal to 2, got '3'"),
        (
            "/wake_up?tags=weights&tags=weigths",
            b"",
            "tags: expected 'weights', 'kv_cache' or 'scheduling', got 'weigths'",
        ),
        ("/reset_prefix_cache?reset_external=", b"", "reset_external: expected a valid boolean, got ''"),
        ("/abort_requests", b'{"request_ids": "a"}', "request_ids: expected a valid list, got 'a'"),
        ("/sleep", b'{"level": "2"}', "level: expected a valid integer, got '2'"),
        ("/reset_prefix_cache", b"[true]", "the body: expected an object, got list"),
    ],
)
async def test_wrong_parameter_is_named(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, content: bytes, message: str
) -> None:
    answer = await fleet.post(path, content=content)
    assert answer.status_code == 400
    assert answer.json() == {"error": {"type": "invalid_request", "message": message, "detail": {}}}
    assert controller.operations == []


async def test_fleet_is_paused_or_asleep_when_every_replica_is(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    assert (await fleet.get("/is_paused")).json() == {"is_paused": False}
    assert (await fleet.get("/is_sleeping")).json() == {"is_sleeping": False}
    controller.serving = controller.serving[:1]
    assert (await fleet.get("/is_paused")).json() == {"is_paused": True}
    assert (await fleet.get("/is_sleeping")).json() == {"is_sleeping": True}


async def test_requests_are_aborted_on_every_replica_and_counted(fleet: httpx.AsyncClient) -> None:
    # Ids are counted as vLLM counts them; without ids, what ran on each replica.
    for ids, aborted in ((["a", "b"], 2), (None, 4)):
        answer = await fleet.post("/abort_requests", json={"request_ids": ids})
        assert answer.json() == {"status": "aborted", "aborted": aborted}


async def test_cache_that_one_replica_cannot_reset_is_no_success(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.busy = {controller.serving[0]}
    assert (await fleet.post("/reset_prefix_cache")).json() == {"success": False}
    assert (await fleet.post("/reset_prefix_cache?reset_running_requests=true")).json() == {"success": True}
