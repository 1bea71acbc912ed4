"""An engine that sleeps: what an update may do to it, and when it goes on."""

import asyncio

import pytest
from fastapi import FastAPI

from deployments.protocol.engine_state import InFlight, Operation, Pause, Resume, Sleep, SleepTag, WakeUp
from deployments.protocol.errors import PayloadRejected
from deployments.protocol.poll import Commit, Draining, KvCache, Receive, RunOperation, StagingOptions
from deployments.replica import replica_engine
from deployments.replica.engine_core import RESET_CACHES
from deployments.replica.replica_engine import DRAIN_POLL_S, EngineDrain, ReplicaEngine
from deployments.replica.staged_member import StagedMember
from tests.deployments.replica.fake_core import Core, Llm

WEIGHTS, KV_CACHE = SleepTag.WEIGHTS, SleepTag.KV_CACHE


@pytest.fixture
def engine() -> ReplicaEngine:
    return ReplicaEngine(Llm(), FastAPI(), version=3)  # type: ignore[arg-type]


def core_of(engine: ReplicaEngine) -> Core:
    core: Core = engine.llm.engine_core
    return core


async def commit(engine: ReplicaEngine, *, hold: bool = False, in_flight: InFlight = InFlight.KEEP) -> None:
    await engine.commit(
        Commit(round_id=1, version=4, hold=hold, kv_cache=KvCache.RECOMPUTE, in_flight=in_flight)
    )


async def call(engine: ReplicaEngine, operation: Operation) -> None:
    await StagedMember(engine).execute(RunOperation(operation=operation))


async def test_an_update_between_the_two_wake_ups_does_not_start_the_scheduler(engine: ReplicaEngine) -> None:
    await call(engine, Sleep(level=1))
    await call(engine, WakeUp(tags=(WEIGHTS,)))
    await commit(engine)
    assert engine.version == 4 and not core_of(engine).running
    await call(engine, WakeUp(tags=(KV_CACHE,)))
    assert core_of(engine).running
    await commit(engine)
    assert core_of(engine).running


async def test_a_part_that_is_awake_already_does_not_keep_the_other_asleep(engine: ReplicaEngine) -> None:
    await call(engine, WakeUp(tags=(WEIGHTS,)))
    await call(engine, Sleep(level=1))
    await call(engine, WakeUp(tags=(WEIGHTS,)))
    assert core_of(engine).asleep == {"kv_cache"}
    await call(engine, WakeUp(tags=(WEIGHTS, KV_CACHE)))
    assert core_of(engine).running and not engine.asleep


async def test_an_update_is_rejected_while_the_weights_sleep(engine: ReplicaEngine) -> None:
    receive = Receive(round_id=1, payload=None, options=StagingOptions())
    await call(engine, Sleep(level=1))
    with pytest.raises(PayloadRejected, match=r"call /wake_up\?tags=weights"):
        await StagedMember(engine).execute(receive)


async def test_resume_waits_for_the_memory_that_sleeps(engine: ReplicaEngine) -> None:
    await call(engine, Sleep(level=1))
    await call(engine, Resume())
    assert not core_of(engine).running
    await call(engine, WakeUp())
    assert core_of(engine).running


async def test_waking_up_ends_a_users_pause_as_it_does_in_vllm(engine: ReplicaEngine) -> None:
    await call(engine, Pause(mode=InFlight.KEEP))
    await call(engine, Sleep(level=0))
    await call(engine, WakeUp(tags=(SleepTag.SCHEDULING,)))
    await commit(engine)
    assert core_of(engine).running, "an update must not leave it paused for good"


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
async def test_nothing_that_a_user_asks_for_ends_a_hold(
    engine: ReplicaEngine, operations: list[Operation], in_flight: InFlight
) -> None:
    """With `commit: together` another replica may still serve the old version."""
    await commit(engine, hold=True, in_flight=in_flight)
    for each in operations:
        await call(engine, each)
    assert not core_of(engine).running and not engine.busy
    await engine.release()
    assert core_of(engine).running


async def test_memory_that_wakes_during_a_hold_does_not_end_it(engine: ReplicaEngine) -> None:
    await call(engine, Sleep(level=1))
    await call(engine, WakeUp(tags=(WEIGHTS,)))
    await commit(engine, hold=True)
    await call(engine, WakeUp(tags=(KV_CACHE,)))
    assert not core_of(engine).asleep and not core_of(engine).running
    await engine.release()
    assert core_of(engine).running


async def test_a_pause_during_a_hold_outlasts_the_release(engine: ReplicaEngine) -> None:
    await commit(engine, hold=True)
    await call(engine, Pause(mode=InFlight.KEEP))
    await engine.release()
    assert not core_of(engine).running
    await call(engine, Resume())
    assert core_of(engine).running


async def test_a_commit_that_does_not_hold_ends_the_hold_before(engine: ReplicaEngine) -> None:
    await commit(engine, hold=True)
    await commit(engine)
    assert core_of(engine).running


async def test_caches_are_reset_before_the_version_changes(
    engine: ReplicaEngine,
) -> None:
    """The messages are sent without waiting for answers: the engine core handles them in the order sent."""
    await commit(engine, in_flight=InFlight.ABORT)
    assert core_of(engine).did == ["finish_weight_update", RESET_CACHES, "version", "resume"]


async def test_a_drain_is_watched_until_somebody_cancels() -> None:
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


async def test_a_drain_says_what_runs_and_begins_nothing(engine: ReplicaEngine) -> None:
    core_of(engine).generating = 2
    await engine.drain("round 1")
    assert not core_of(engine).running
    assert engine.draining == Draining(drain_ids=("round 1",), running=2)
    core_of(engine).generating = 0
    await asyncio.sleep(3 * DRAIN_POLL_S)
    assert engine.draining == Draining(drain_ids=("round 1",), running=0)
    await engine.end_drain("round 1")
    assert engine.draining is None and core_of(engine).running


async def test_an_engine_that_hangs_is_not_waited_for(
    engine: ReplicaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_engine, "COUNT_S", 0.05)
    monkeypatch.setattr(core_of(engine), "call_utility_async", lambda *_: asyncio.Event().wait())
    await engine.drain("round 1")
    assert engine.draining == Draining(drain_ids=("round 1",), running=None)


async def test_a_drain_ends_with_the_last_who_asked_for_it(engine: ReplicaEngine) -> None:
    await engine.drain("round 1")
    await engine.drain("call 5")
    await engine.end_drain("call 5")
    await engine.end_drain("call 4")
    assert not core_of(engine).running
    await engine.end_drain("round 1")
    assert core_of(engine).running


@pytest.mark.parametrize("in_flight", list(InFlight))
async def test_a_commit_ends_the_drain_of_its_round_only(engine: ReplicaEngine, in_flight: InFlight) -> None:
    await engine.drain("round 1")
    await commit(engine, in_flight=in_flight)
    assert engine.version == 4 and core_of(engine).running and engine.draining is None
    await engine.drain("call 5")
    await commit(engine, in_flight=in_flight)
    assert not core_of(engine).running and engine.draining is not None


async def test_a_drain_begins_with_the_release_if_the_engine_is_held(engine: ReplicaEngine) -> None:
    await commit(engine, hold=True)
    await engine.drain("call 5")
    await engine.release()
    assert not core_of(engine).running
    await engine.end_drain("call 5")
    assert core_of(engine).running


async def test_what_a_user_asked_for_outlasts_the_drain(engine: ReplicaEngine) -> None:
    await engine.drain("call 5")
    await call(engine, Pause(mode=InFlight.WAIT))
    await engine.end_drain("call 5")
    assert not core_of(engine).running
    await call(engine, Resume())
    await engine.drain("call 6")
    await call(engine, Sleep(level=1, mode=InFlight.WAIT))
    await engine.end_drain("call 6")
    assert core_of(engine).asleep and not core_of(engine).running
    await call(engine, WakeUp())
    assert core_of(engine).running


@pytest.mark.parametrize("operation", [Resume(), WakeUp(), Pause(mode=InFlight.KEEP)])
async def test_nothing_that_a_user_asks_for_ends_a_drain(engine: ReplicaEngine, operation: Operation) -> None:
    await engine.drain("round 1")
    await call(engine, operation)
    assert not core_of(engine).running
    await engine.end_drain("round 1")
    assert core_of(engine).running == (not isinstance(operation, Pause))
