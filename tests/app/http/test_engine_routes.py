"""Pause, sleep and the like: every parameter reaches the controller as an operation."""

from collections.abc import AsyncIterator

import httpx
import pytest

from deployments.protocol.engine_state import (
    AbortRequests,
    InFlight,
    Operation,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    SleepTag,
    WakeUp,
)
from deployments.protocol.errors import Conflict
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import client


@pytest.fixture
def controller() -> FakeController:
    return FakeController()


@pytest.fixture
async def fleet(controller: FakeController) -> AsyncIterator[httpx.AsyncClient]:
    async with client(controller) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/pause", Pause(mode=InFlight.ABORT, clear_cache=True)),
        ("/pause?mode=keep&clear_cache=false", Pause(mode=InFlight.KEEP, clear_cache=False)),
        ("/pause?mode=wait&clear_cache=1&unknown=3", Pause(mode=InFlight.WAIT, clear_cache=True)),
        ("/pause?mode=keep&mode=wait", Pause(mode=InFlight.WAIT)),
        ("/resume", Resume()),
        ("/sleep", Sleep(level=1, mode=InFlight.ABORT)),
        ("/sleep?level=2&mode=keep", Sleep(level=2, mode=InFlight.KEEP)),
        ("/sleep?level=0", Sleep(level=0)),
        ("/wake_up", WakeUp(tags=None)),
        ("/wake_up?tags=weights", WakeUp(tags=(SleepTag.WEIGHTS,))),
        (
            "/wake_up?tags=kv_cache&tags=weights&tags=kv_cache",
            WakeUp(tags=(SleepTag.KV_CACHE, SleepTag.WEIGHTS)),
        ),
        ("/reset_prefix_cache", ResetPrefixCache()),
        (
            "/reset_prefix_cache?reset_running_requests=true&reset_external=True",
            ResetPrefixCache(reset_running_requests=True, reset_connector=True),
        ),
    ],
)
async def test_parameters_become_an_operation(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, operation: Operation
) -> None:
    assert (await fleet.post(path)).status_code == 200
    assert controller.operations == [operation]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/pause", b'{"status":"paused"}'),
        ("/resume", b'{"status":"resumed"}'),
        ("/sleep?level=2", b'{"status":"sleeping","level":2}'),
        ("/wake_up?tags=weights", b'{"status":"awake","tags":["weights"]}'),
        ("/reset_prefix_cache", b'{"success":true}'),
    ],
)
async def test_answers_are_those_of_vllm(fleet: httpx.AsyncClient, path: str, answer: bytes) -> None:
    assert (await fleet.post(path)).content == answer


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/pause?mode=nap", "mode: expected 'keep', 'wait' or 'abort', got 'nap'"),
        ("/pause?clear_cache=soon", "clear_cache: expected a valid boolean, got 'soon'"),
        ("/sleep?level=3", "level: expected less than or equal to 2, got '3'"),
        ("/sleep?level=deep", "level: expected a valid integer, got 'deep'"),
        ("/sleep?level=1&mode=", "mode: expected 'keep', 'wait' or 'abort', got ''"),
        (
            "/wake_up?tags=weights&tags=weigths",
            "tags: expected 'weights', 'kv_cache' or 'scheduling', got 'weigths'",
        ),
        ("/reset_prefix_cache?reset_external=", "reset_external: expected a valid boolean, got ''"),
    ],
)
async def test_a_wrong_parameter_is_named(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, message: str
) -> None:
    answer = await fleet.post(path)
    assert answer.status_code == 400
    assert answer.json() == {"error": {"type": "invalid_request", "message": message, "detail": {}}}
    assert controller.operations == []


async def test_a_fleet_is_paused_or_asleep_when_every_replica_is(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    assert (await fleet.get("/is_paused")).json() == {"is_paused": False}
    assert (await fleet.get("/is_sleeping")).json() == {"is_sleeping": False}
    controller.serving = controller.serving[:1]
    assert (await fleet.get("/is_paused")).json() == {"is_paused": True}
    assert (await fleet.get("/is_sleeping")).json() == {"is_sleeping": True}


@pytest.mark.parametrize(
    ("content", "request_ids"),
    [
        (b"", None),
        (b"{}", None),
        (b'{"request_ids": null}', None),
        (b'{"request_ids": []}', ()),
        (b'{"request_ids": ["a", "b"], "reason": "x"}', ("a", "b")),
    ],
)
async def test_requests_are_aborted_on_every_replica_and_counted(
    fleet: httpx.AsyncClient, controller: FakeController, content: bytes, request_ids: tuple[str, ...] | None
) -> None:
    answer = await fleet.post("/abort_requests", content=content)
    # Ids are counted as vLLM counts them; without ids, what ran on each replica.
    assert answer.json() == {"status": "aborted", "aborted": 2 if request_ids else 4}
    assert controller.operations == [AbortRequests(request_ids=request_ids)]


async def test_request_ids_that_are_no_list_are_refused(fleet: httpx.AsyncClient) -> None:
    answer = await fleet.post("/abort_requests", json={"request_ids": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "request_ids: expected a valid list, got 'a'"


async def test_what_the_controller_refuses_is_passed_on(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.fail_next["call"] = Conflict("wake the weights first: /wake_up?tags=weights")
    answer = await fleet.post("/wake_up")
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "conflict")


async def test_a_fleet_is_awake_when_every_replica_is(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.sleepers = {controller.serving[1]}
    assert (await fleet.post("/wake_up")).json() == {"status": "sleeping", "tags": None}


@pytest.mark.parametrize(
    ("path", "content", "flags"),
    [
        ("", b"", (False, False)),
        ("", b"{}", (False, False)),
        ("", b'{"reset_running_requests": true}', (True, False)),  # SkyRL
        ("?reset_external=true", b'{"reset_running_requests": false}', (False, True)),
        ("?reset_running_requests=1", b'{"reset_external": true, "model": "m"}', (True, True)),
    ],
)
async def test_the_flags_of_a_reset_come_in_the_query_or_in_a_body(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, content: bytes, flags: tuple[bool, bool]
) -> None:
    assert (await fleet.post(f"/reset_prefix_cache{path}", content=content)).json() == {"success": True}
    assert controller.operations == [
        ResetPrefixCache(reset_running_requests=flags[0], reset_connector=flags[1])
    ]


@pytest.mark.parametrize(
    ("path", "content", "operation"),
    [
        ("/sleep", b'{"level": 2}', Sleep(level=2)),  # SkyRL
        ("/sleep", b'{"level": 2, "tags": ["weights"], "mode": "keep"}', Sleep(level=2, mode=InFlight.KEEP)),
        ("/sleep?level=1", b'{"level": 2}', Sleep(level=1)),
        ("/sleep?mode=wait", b'{"level": 0}', Sleep(level=0, mode=InFlight.WAIT)),
        ("/wake_up", b'{"tags": ["weights"]}', WakeUp(tags=(SleepTag.WEIGHTS,))),  # SkyRL
        ("/wake_up", b'{"tags": null}', WakeUp(tags=None)),
        ("/wake_up?tags=kv_cache", b'{"tags": ["weights"]}', WakeUp(tags=(SleepTag.KV_CACHE,))),
    ],
)
async def test_a_sleep_is_described_in_the_query_or_in_a_body(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, content: bytes, operation: Operation
) -> None:
    assert (await fleet.post(path, content=content)).status_code == 200
    assert controller.operations == [operation]


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("/sleep", b'{"level": 3}', "level: expected less than or equal to 2, got 3"),
        ("/sleep", b'{"level": "2"}', "level: expected a valid integer, got '2'"),
        ("/wake_up", b'{"tags": "weights"}', "tags: expected a valid list, got 'weights'"),
        ("/wake_up", b'{"tags": ["all"]}', "tags: expected 'weights', 'kv_cache' or 'scheduling', got 'all'"),
    ],
)
async def test_a_sleep_that_is_none_is_refused(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, content: bytes, message: str
) -> None:
    answer = await fleet.post(path, content=content)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    assert controller.operations == []


async def test_flags_of_a_reset_that_are_none_are_named(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    for content in (b'{"reset_running_requests": "yes"}', b"[true]", b"{"):
        answer = await fleet.post("/reset_prefix_cache", content=content)
        assert answer.status_code == 400, content
    assert controller.operations == []


async def test_a_cache_that_one_replica_cannot_reset_is_no_success(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.busy = {controller.serving[0]}
    assert (await fleet.post("/reset_prefix_cache")).json() == {"success": False}
    assert (await fleet.post("/reset_prefix_cache?reset_running_requests=true")).json() == {"success": True}
