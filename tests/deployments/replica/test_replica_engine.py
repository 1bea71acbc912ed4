import asyncio

import pytest
from fastapi import FastAPI

from deployments.protocol.engine_state import InFlight, Operation, Pause, Resume, Sleep, SleepTag, WakeUp
from deployments.protocol.poll import Commit, Draining, KvCache, RunOperation
from deployments.replica import replica_engine
from deployments.replica.member import StagedMember
from deployments.replica.replica_engine import DRAIN_POLL_S, EngineDrain, ReplicaEngine
from tests.deployments.replica.fake_vllm import FakeLlm

WEIGHTS, KV_CACHE = SleepTag.WEIGHTS, SleepTag.KV_CACHE


@pytest.fixture
def engine() -> ReplicaEngine:
    return ReplicaEngine(FakeLlm(), FastAPI(), version=3)  # type: ignore[arg-type]


def core_of(engine: ReplicaEngine) -> FakeLlm:
    core: FakeLlm = engine.llm.engine_core
    return core


async def commit(engine: ReplicaEngine, *, hold: bool = False, in_flight: InFlight = InFlight.KEEP) -> None:
    await engine.workers("start_weight_update")
    core_of(engine).did.clear()
    await engine.commit(
        Commit(round_id=1, version=4, hold=hold, kv_cache=KvCache.RECOMPUTE, in_flight=in_flight)
    )


async def call(engine: ReplicaEngine, operation: Operation) -> None:
    await StagedMember(engine).execute(RunOperation(operation=operation))


async def test_wake_up_ends_a_pause_as_in_vllm(engine: ReplicaEngine) -> None:
    await call(engine, Pause(mode=InFlight.KEEP))
    await call(engine, Sleep(level=0))
    await call(engine, WakeUp(tags=(SleepTag.SCHEDULING,)))
    await commit(engine)
    assert core_of(engine).begins, "an update must not leave it paused for good"


@pytest.mark.parametrize("in_flight", list(InFlight))
@pytest.mark.parametrize(
    "operations",
    [
        [Resume()],
        [Pause(mode=InFlight.KEEP), Resume()],
        [WakeUp()],
        [Sleep(level=0), WakeUp(tags=(SleepTag.SCHEDULING,))],
    ],
)
async def test_user_operations_do_not_end_a_hold(
    engine: ReplicaEngine, operations: list[Operation], in_flight: InFlight
) -> None:
    """With `commit: together` another replica may still serve the old version."""
    await commit(engine, hold=True, in_flight=in_flight)
    for each in operations:
        await call(engine, each)
    assert not core_of(engine).begins and not engine.busy
    await engine.release()
    assert core_of(engine).begins


@pytest.mark.parametrize("in_flight", list(InFlight))
async def test_after_a_failed_swap_no_request_begins_until_the_fence(
    engine: ReplicaEngine, in_flight: InFlight
) -> None:
    """Those that arrived in the pause would be answered with the old weights, or with a mixture, as the new
    version."""
    core_of(engine).fails["finish_weight_update"] = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        await commit(engine, in_flight=in_flight)
    assert not core_of(engine).begins and "version 4" not in core_of(engine).did


async def test_drain_watch_can_be_cancelled() -> None:
    """Also if the cancellation comes in the moment in which the engine core has answered."""
    asked = asyncio.Event()

    async def ask(utility: str) -> list[int]:
        asked.set()
        return [1]

    drain = EngineDrain(ask)
    await drain.begin("round 1", may_run=True)
    asked.clear()
    watching = drain._watching
    assert watching is not None
    await asked.wait()
    watching.cancel()
    await asyncio.wait({watching}, timeout=2)
    assert watching.cancelled()


async def test_drain_reports_running_requests_and_schedules_no_new_one(engine: ReplicaEngine) -> None:
    core_of(engine).generating = 2
    await engine.drain("round 1")
    assert not core_of(engine).begins
    assert engine.drains.state == Draining(drain_ids=("round 1",), running=2)
    core_of(engine).generating = 0
    await asyncio.sleep(3 * DRAIN_POLL_S)
    assert engine.drains.state == Draining(drain_ids=("round 1",), running=0)
    await engine.end_drain("round 1")
    assert engine.drains.state is None and core_of(engine).begins


async def test_drain_does_not_wait_for_a_hung_engine(
    engine: ReplicaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_engine, "COUNT_S", 0.05)
    monkeypatch.setattr(core_of(engine), "call_utility_async", lambda *_: asyncio.Event().wait())
    await engine.drain("round 1")
    assert engine.drains.state == Draining(drain_ids=("round 1",), running=None)


@pytest.mark.parametrize("in_flight", list(InFlight))
async def test_commit_ends_the_drain_of_its_round_only(engine: ReplicaEngine, in_flight: InFlight) -> None:
    await engine.drain("round 1")
    await commit(engine, in_flight=in_flight)
    assert engine.version == 4 and core_of(engine).begins and engine.drains.state is None
    await engine.drain("call 5")
    await commit(engine, in_flight=in_flight)
    assert not core_of(engine).begins and engine.drains.state is not None
