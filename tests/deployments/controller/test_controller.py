"""The controller's shell: what replicas, publishers and operators get for an answer."""

import asyncio
import pickle

import pytest
import torch
from ray.exceptions import RayTaskError

from deployments.protocol.engine_state import InFlight, IsPaused, Pause, Sleep
from deployments.protocol.errors import FleetUnavailable, InvalidRequest, ReplicaUnavailable, StalePublisher
from deployments.protocol.poll import Outcome, RunOperation
from tests.deployments.controller.fleet import LONGER_THAN_ANY_DEADLINE_S, Fleet, publish
from tests.deployments.ledger.fake_replica import FakeReplica


async def test_a_round_moves_every_replica_and_reports_timings(fleet: Fleet) -> None:
    await fleet.serve("a", "b")
    report = await publish(fleet, "step-1")
    assert (report.phase, report.version, report.label) == ("committed", 1, "step-1")
    assert {each.version for each in fleet.replicas.values()} == {1}
    assert report.replicas["a"].bytes == 10 and report.replicas["b"].gap_s == 0.02
    status = await fleet.controller.fleet()
    assert (status.committed_version, status.label, status.ready) == (1, "step-1", True)
    assert [each.round_id for each in await fleet.controller.rounds()] == [report.round_id]


@pytest.mark.parametrize("value", [torch.zeros(2), b"bytes", (1, 2), {"nested": [torch.zeros(1)]}])
async def test_no_tensor_enters_the_controller(fleet: Fleet, value: object) -> None:
    await fleet.serve("a")
    controller = fleet.controller
    lease = await controller.acquire("trainer")
    with pytest.raises(InvalidRequest, match=r"init_info\.x.*: expected JSON types only"):
        await controller.connect(lease.token, {"x": value})  # type: ignore[dict-item]
    await controller.connect(lease.token, {})
    round_id = await controller.open_round(lease.token)
    with pytest.raises(InvalidRequest, match=r"payload\.0\.x.*: expected JSON types only"):
        await controller.send(lease.token, round_id, [{"x": value}])  # type: ignore[list-item, dict-item]


async def test_a_replica_whose_process_is_gone_is_lost_before_its_heartbeat_runs_out(fleet: Fleet) -> None:
    await fleet.serve("a", "b")
    fleet.kill("b")
    await fleet.elapse(2.5)  # silent, and far from the heartbeat's end
    await fleet.members(1)
    await publish(fleet)
    assert fleet.replicas["a"].version == 1


async def test_a_hung_process_is_killed_once_its_replica_is_lost_and_blocks_no_round(fleet: Fleet) -> None:
    await fleet.serve("a", "b")
    fleet.ray_answers.clear()  # Ray hangs as well
    fleet.hang("b")
    for _ in range(2):
        await fleet.elapse(2.6)
        await fleet.polled("a")
    await fleet.members(1)
    await publish(fleet)
    assert not fleet.killed
    fleet.ray_answers.set()
    await fleet.until(lambda: bool(fleet.killed))
    assert fleet.killed == ["b"]


async def test_a_process_that_cannot_be_ended_is_named_in_the_log(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.kill_fails = RuntimeError("no GCS")
    await fleet.serve("a", "b")
    fleet.hang("b")
    for _ in range(2):
        await fleet.elapse(2.6)
        await fleet.polled("a")
    await fleet.members(1)
    await fleet.until(lambda: "failed to kill replica b: RuntimeError: no GCS" in caplog.text)
    await publish(fleet)


async def test_versions_that_there_are_not_are_refused(fleet: Fleet) -> None:
    with pytest.raises(InvalidRequest, match="version: expected at most"):
        await fleet.controller.stored(3, "/x")


async def test_a_call_returns_each_replicas_value_or_names_those_that_failed(fleet: Fleet) -> None:
    await fleet.serve("a", "b")
    assert await fleet.controller.call(Pause(mode=InFlight.KEEP)) == {"a": "pause on a", "b": "pause on b"}
    fleet.replicas["b"].outcomes[RunOperation] = Outcome.REPLICA_FAILED
    with pytest.raises(ReplicaUnavailable, match="not done by b: replica_failed here"):
        await fleet.controller.call(Sleep())
    await fleet.until(lambda: fleet.replicas["b"].fenced is not None)


async def test_events_are_waited_for_and_have_increasing_ids(fleet: Fleet) -> None:
    seen = await fleet.controller.events()
    last = seen[-1].event_id
    assert await fleet.controller.events(last) == []
    waiting = asyncio.create_task(fleet.controller.events(last, LONGER_THAN_ANY_DEADLINE_S))
    fleet.start("a")
    events = await asyncio.wait_for(waiting, 5)
    assert events[0].name == "register"
    assert [event.event_id for event in events] == list(range(last + 1, last + 1 + len(events)))


async def test_after_a_restart_an_operation_waits_for_those_that_still_serve(fleet: Fleet) -> None:
    await fleet.serve("a", "b")
    await fleet.restart("b")
    paused = asyncio.create_task(fleet.controller.call(IsPaused()))
    await fleet.polled("a")
    assert not paused.done()
    fleet.add(fleet.replicas["b"])
    assert set(await asyncio.wait_for(paused, 5)) == {"a", "b"}


async def test_a_newer_poll_supersedes_an_older_one(fleet: Fleet) -> None:
    replica = FakeReplica(replica_id="a", incarnation="a-1")
    replica.take(await fleet.controller.poll(replica.report()))
    older = asyncio.create_task(fleet.controller.poll(replica.report()))
    await asyncio.sleep(0)  # it has begun to wait
    await fleet.controller.poll(replica.report())
    with pytest.raises(FleetUnavailable, match="newer poll"):
        await older


def test_errors_keep_their_class_and_detail_through_ray() -> None:
    error = StalePublisher("token 1 is stale", {"token": 1})
    wrapped = RayTaskError("poll", "traceback", error).as_instanceof_cause()
    crossed = pickle.loads(pickle.dumps(RayTaskError("poll", "traceback", error))).as_instanceof_cause()
    for each in (wrapped, crossed):
        assert isinstance(each, StalePublisher)
        assert (each.status, each.message, each.detail) == (409, "token 1 is stale", {"token": 1})
        assert each.body()["error"]["type"] == "stale_publisher"
