"""An engine that sleeps: what an update may do to it, and when it goes on."""

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from deployments.errors import PayloadRejected
from deployments.protocol.instructions import Call, Commit, KvCache, Receive, StagingOptions
from deployments.protocol.operations import InFlight, Operation, Pause, Resume, Sleep, SleepTag, WakeUp
from deployments.replica.engine import Engine
from deployments.replica.engine_core import COMMIT
from deployments.replica.staged_member import StagedMember


class Core:
    """Stands where vLLM's engine core client does; `running` is what its scheduler would do."""

    def __init__(self) -> None:
        self.running = True
        self.asleep: set[str] = set()

    async def pause_scheduler_async(self, **options: Any) -> None:
        self.running = False

    async def set_weight_version_async(self, version: str) -> None:
        pass

    async def resume_scheduler_async(self) -> None:
        assert not self.asleep, "a step without its memory ends the engine"
        self.running = True

    async def call_utility_async(self, method: str, version: str, recompute: bool, resume: bool) -> float:
        assert method == COMMIT
        self.running = False
        if resume:
            await self.resume_scheduler_async()
        return 0.0


class Llm:
    """Stands where an AsyncLLM does."""

    def __init__(self) -> None:
        self.engine_core = Core()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.engine_core.running = False

    async def sleep(self, level: int, mode: str) -> None:
        self.engine_core.running = False
        if level:
            self.engine_core.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: list[str] | None) -> bool:
        core = self.engine_core
        # vLLM's executor does nothing, with a warning, if one of the named parts is awake.
        if tags is None or set(tags) - {"scheduling"} <= core.asleep:
            core.asleep -= set(core.asleep if tags is None else tags)
        if not core.asleep:
            core.running = True
        return not core.asleep

    async def collective_rpc(self, method: str, kwargs: Any) -> list[Any]:
        return [None]


WEIGHTS, KV_CACHE = SleepTag.WEIGHTS, SleepTag.KV_CACHE


@pytest.fixture
def engine() -> Engine:
    return Engine(Llm(), FastAPI(), version=3)  # type: ignore[arg-type]


def core_of(engine: Engine) -> Core:
    core: Core = engine.llm.engine_core
    return core


async def commit(engine: Engine, *, hold: bool = False, in_flight: InFlight = InFlight.KEEP) -> None:
    await engine.commit(
        Commit(round_id=1, version=4, hold=hold, kv_cache=KvCache.RECOMPUTE, in_flight=in_flight)
    )


async def call(engine: Engine, operation: Operation) -> None:
    await StagedMember(engine).execute(Call(operation=operation))


async def test_an_update_between_the_two_wake_ups_does_not_start_the_scheduler(engine: Engine) -> None:
    await call(engine, Sleep(level=1))
    await call(engine, WakeUp(tags=(WEIGHTS,)))
    await commit(engine)
    assert engine.version == 4 and not core_of(engine).running
    await call(engine, WakeUp(tags=(KV_CACHE,)))
    assert core_of(engine).running
    await commit(engine)
    assert core_of(engine).running


async def test_a_part_that_is_awake_already_does_not_keep_the_other_asleep(engine: Engine) -> None:
    await call(engine, WakeUp(tags=(WEIGHTS,)))
    await call(engine, Sleep(level=1))
    await call(engine, WakeUp(tags=(WEIGHTS,)))
    assert core_of(engine).asleep == {"kv_cache"}
    await call(engine, WakeUp(tags=(WEIGHTS, KV_CACHE)))
    assert core_of(engine).running and not engine.asleep


async def test_an_update_is_rejected_while_the_weights_sleep(engine: Engine) -> None:
    receive = Receive(round_id=1, payload=None, options=StagingOptions())
    await call(engine, Sleep(level=1))
    with pytest.raises(PayloadRejected, match=r"POST /wake_up\?tags=weights"):
        await StagedMember(engine).execute(receive)


async def test_resume_waits_for_the_memory_that_sleeps(engine: Engine) -> None:
    await call(engine, Sleep(level=1))
    await call(engine, Resume())
    assert not core_of(engine).running
    await call(engine, WakeUp())
    assert core_of(engine).running


async def test_waking_up_ends_a_users_pause_as_it_does_in_vllm(engine: Engine) -> None:
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
    engine: Engine, operations: list[Operation], in_flight: InFlight
) -> None:
    """With `commit: together` another replica may still serve the old version."""
    await commit(engine, hold=True, in_flight=in_flight)
    for each in operations:
        await call(engine, each)
    assert not core_of(engine).running and not engine.busy
    await engine.release()
    assert core_of(engine).running


async def test_memory_that_wakes_during_a_hold_does_not_end_it(engine: Engine) -> None:
    await call(engine, Sleep(level=1))
    await call(engine, WakeUp(tags=(WEIGHTS,)))
    await commit(engine, hold=True)
    await call(engine, WakeUp(tags=(KV_CACHE,)))
    assert not core_of(engine).asleep and not core_of(engine).running
    await engine.release()
    assert core_of(engine).running


async def test_a_pause_during_a_hold_outlasts_the_release(engine: Engine) -> None:
    await commit(engine, hold=True)
    await call(engine, Pause(mode=InFlight.KEEP))
    await engine.release()
    assert not core_of(engine).running
    await call(engine, Resume())
    assert core_of(engine).running


async def test_a_commit_that_does_not_hold_ends_the_hold_before(engine: Engine) -> None:
    await commit(engine, hold=True)
    await commit(engine)
    assert core_of(engine).running
