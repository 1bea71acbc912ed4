import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import RequestCancelledError
from safetensors.torch import save_file

from app.http import fleet_routes
from app.http.prometheus import LOAD, RUNNING
from deployments.protocol.errors import FleetUnavailable, RoundAborted
from deployments.protocol.poll import FilePart
from deployments.protocol.responses import ACCEPTED, DRAFTED, DRAFTING_OFF, Event, ReplicaLoad
from deployments.router.scrape import Scraped
from tests.app.http.fake_controller import FakeController, Handle
from tests.app.http.fake_trainer import FakeTrainer
from tests.app.http.serving import client


async def test_health_is_503_until_one_replica_serves() -> None:
    controller = FakeController()
    async with client(controller) as fleet:
        good = await fleet.get("/health")
        controller.serving = ()
        bad = await fleet.get("/health")
    assert good.status_code == 200
    assert good.json() == {"status": "ok", "serving": 2, "members": 2, "weight_version": 3}
    assert bad.status_code == 503
    assert bad.json() == {"status": "starting", "serving": 0, "members": 0, "weight_version": 3}


async def test_status_and_the_history_are_the_controllers() -> None:
    controller = FakeController()
    async with client(controller) as fleet:
        expected = json.loads(json.dumps(asdict(await controller.fleet())))
        assert (await fleet.get("/fleet")).json() == expected
        expected = [json.loads(json.dumps(asdict(each))) for each in controller.reports]
        assert (await fleet.get("/fleet/rounds")).json() == {"rounds": expected}
        assert (await fleet.get("/fleet/rounds?after=2")).json() == {"rounds": expected}
        assert (await fleet.get("/fleet/rounds?after=3")).json() == {"rounds": []}
        assert (await fleet.get("/fleet/rounds?after=x")).status_code == 400


async def test_the_versions_in_the_store_are_listed() -> None:
    controller = FakeController()
    controller.stored = {2: "/store/v2", 3: "/store/v3"}
    async with client(controller) as fleet:
        assert (await fleet.get("/fleet/versions")).json() == {"versions": [2, 3]}


async def test_load_is_what_the_engines_of_each_replica_count() -> None:
    asked: list[str] = []

    async def scrape(names: Sequence[str]) -> Scraped:
        asked.extend(names)
        engines = "".join(
            f'vllm:generation_tokens_total{{engine="{engine}"}} 100.0\n'
            f'vllm:num_requests_running{{engine="{engine}"}} 2\n'
            f'vllm:kv_cache_usage_perc{{engine="{engine}"}} 0.{engine}5\n'
            for engine in (1, 2)
        )
        for version, drafted, accepted in ((9, 900, 90), (10, 40, 30)):
            engines += f'{DRAFTED}{{version="{version}"}} {drafted}\n'
            engines += f'{ACCEPTED}{{version="{version}"}} {accepted}\n'
        engines += f"{DRAFTING_OFF} 1.0\n"
        return Scraped(replicas={"a": engines, "late": None, "odd": "{", "lost": f"{RUNNING} NaN\n"})

    load = await fleet_routes.load(scrape)
    two = ReplicaLoad(
        generated_tokens=200,
        running=4,
        waiting=0,
        kv_cache_use=0.25,
        drafted_tokens=40,
        accepted_tokens=30,
        drafting_off=True,
    )
    assert (load.replicas, load.dashboard) == ({"a": two}, None)
    assert asked == [*LOAD]


async def test_rollback_needs_a_version(tmp_path: Path) -> None:
    async def rollback(fleet: httpx.AsyncClient, body: object) -> tuple[int, Any]:
        answer = await fleet.post("/fleet/rollback", json=body)
        return answer.status_code, answer.json()

    controller = FakeController()
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    controller.stored = {2: str(tmp_path)}
    async with client(controller, checkpoint_roots=[tmp_path]) as fleet:  # without a trainer: from the store
        code, refused = await rollback(fleet, {"version": 7})
        assert code == 400 and "expected one in the store [2], got 7" in refused["error"]["message"]
        controller.fail_next["send"] = RoundAborted("too few replicas staged", {"round_id": 4})
        code, refused = await rollback(fleet, {"version": 2})
        assert code == 409 and refused["error"]["message"] == (
            "the fleet is not rolled back to version 2: too few replicas staged; roll back again"
        )
        code, made = await rollback(fleet, {"version": 2})
        assert (code, made["version"], made["label"]) == (200, 4, "rollback to 2")
        assert isinstance(controller.sent[0], FilePart) and controller.lease is None
    async with client(FakeController(), trainer=FakeTrainer()) as fleet:
        code, made = await rollback(fleet, {"version": 2})
        assert code == 200 and made["version"] == 5
        code, refused = await rollback(fleet, {"version": 3})
        assert code == 409 and refused["error"]["message"].endswith(
            "too few replicas staged; roll back again"
        )
        for body, message in (
            ({"version": 7}, "expected one in the store [2], got 7"),
            ({"version": "2"}, "version: expected a valid integer, got '2'"),
            ({"version": True}, "version: expected a valid integer, got True"),
            ({}, "expected the field 'version', got []"),
            ({"version": 2, "force": True}, "expected no other fields than ['version'], got 'force'"),
        ):
            code, refused = await rollback(fleet, body)
            assert code == 400 and message in refused["error"]["message"]


async def test_operator_sets_the_number_of_replicas() -> None:
    async def scale(body: object) -> tuple[int, Any]:
        answer = await fleet.post("/fleet/scale", json=body)
        return answer.status_code, answer.json()

    async with client(FakeController()) as fleet:
        assert (await scale({"replicas": 3}))[1]["wanted"] == 3
        assert (await scale({"replicas": "auto"}))[1]["wanted"] is None
        assert (await scale({"replicas": 9}))[1]["error"]["message"].startswith("replicas: expected 1 to 4")
        for body, message in (
            ({"replicas": 0}, "replicas: expected greater than 0 or 'auto', got 0"),
            ({"replicas": "many"}, "replicas: expected a valid integer or 'auto', got 'many'"),
            ({}, "expected the field 'replicas', got []"),
        ):
            code, refused = await scale(body)
            assert code == 400 and refused["error"]["message"] == message


def events(controller: FakeController, since: int = 0, last_event_id: int | None = None) -> Any:
    return fleet_routes.events(Handle(controller), since, last_event_id)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "first"),
    [({}, 1), ({"since": 1}, 2), ({"last_event_id": 1}, 2), ({"since": 2, "last_event_id": 0}, 1)],
)
async def test_events_continue_where_the_client_stopped(asked: dict[str, int], first: int) -> None:
    controller = FakeController()
    controller.recorded = [
        Event(event_id=number, name="commit", at=1.5, fields={"version": number}) for number in (1, 2)
    ]
    stream = (await events(controller, **asked)).body_iterator
    assert await anext(stream) == ": connected\n\n"
    data = {"id": first, "event": "commit", "at": 1.5, "version": first}
    assert await anext(stream) == f"id: {first}\nevent: commit\ndata: {json.dumps(data)}\n\n"
    controller.recorded = []
    rest = [await anext(stream) for _ in range(3 - first)]
    assert rest[-1] == ": no new events\n\n"


@pytest.mark.parametrize(
    "error",
    [FleetUnavailable("is gone"), RayActorError(), TaskCancelledError(), RequestCancelledError("1")],
    ids=lambda error: type(error).__name__,
)
async def test_events_end_in_order_with_the_controller_or_the_client(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has begun: an error would be a stack trace in the log, and nothing that the client reads."""

    async def fail(since: int, wait_s: float) -> list[Event]:
        raise error

    controller = FakeController()
    monkeypatch.setattr(controller, "events", fail)
    stream = (await events(controller)).body_iterator
    assert [piece async for piece in stream] == [": connected\n\n"]


async def test_metrics_count_rounds_and_replicas() -> None:
    async with client(FakeController()) as fleet:
        text = (await fleet.get("/metrics")).text
    assert (
        "slipstream_weight_version 3.0" in text and 'slipstream_rounds_total{outcome="aborted"} 0.0' in text
    )
    assert 'slipstream_replica_serving{replica="r1"} 1.0' in text
    assert 'slipstream_last_round_gap_seconds{replica="replica-0"} 0.5' in text
