"""An engine that sleeps: what an update may do to it, and when it goes on."""

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from deployments.protocol import (
    CommitArgs,
    FleetOperation,
    InFlight,
    Instruction,
    InstructionKind,
    KvCache,
)
from deployments.replica.engine import Engine
from deployments.replica.engine_core import COMMIT
from deployments.replica.follower import Rejected
from deployments.replica.staged_member import EngineMember


class Core:
    """Stands where vLLM's engine core client does; `running` is what its scheduler would do."""

    def __init__(self) -> None:
        self.running = True
        self.asleep: set[str] = set()

    async def pause_scheduler_async(self, **options: Any) -> None:
        self.running = False

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

    async def sleep(self, level: int, mode: str) -> None:
        self.engine_core.running = False
        self.engine_core.asleep = {"weights", "kv_cache"} if level else set()

    async def wake_up(self, tags: list[str] | None) -> bool:
        core = self.engine_core
        if tags is not None and not set(tags) - {"scheduling"} <= core.asleep:
            return not core.asleep  # as vLLM's executor: a warning, and nothing is done
        core.asleep -= set(core.asleep if tags is None else tags)
        if not core.asleep:
            core.running = True
        return not core.asleep

    async def collective_rpc(self, method: str, kwargs: Any) -> list[Any]:
        return [None]


@pytest.fixture
def engine() -> Engine:
    return Engine(Llm(), FastAPI(), version=3)  # type: ignore[arg-type]


def core_of(engine: Engine) -> Core:
    core: Core = engine.llm.engine_core
    return core


async def commit(engine: Engine) -> None:
    args = CommitArgs(
        round_id=1,
        version=4,
        label=None,
        hold=False,
        kv_cache=KvCache.RECOMPUTE,
        in_flight=InFlight.KEEP,
    )
    await engine.commit(args)


async def call(engine: Engine, operation: FleetOperation, **arguments: Any) -> None:
    args = {"operation": operation.value, "arguments": arguments}
    await EngineMember(engine).execute(
        Instruction(seq=1, kind=InstructionKind.CALL, args=args, deadline_s=5.0)
    )


async def test_an_update_between_the_two_wake_ups_does_not_start_the_scheduler(engine: Engine) -> None:
    await call(engine, FleetOperation.SLEEP, level=1)
    await call(engine, FleetOperation.WAKE_UP, tags=["weights"])
    await commit(engine)
    assert engine.version == 4 and not core_of(engine).running
    await call(engine, FleetOperation.WAKE_UP, tags=["kv_cache"])
    assert core_of(engine).running
    await commit(engine)
    assert core_of(engine).running


async def test_a_part_that_is_awake_already_does_not_keep_the_other_asleep(engine: Engine) -> None:
    await call(engine, FleetOperation.WAKE_UP, tags=["weights"])
    await call(engine, FleetOperation.SLEEP, level=1)
    await call(engine, FleetOperation.WAKE_UP, tags=["weights"])
    assert core_of(engine).asleep == {"kv_cache"}
    await call(engine, FleetOperation.WAKE_UP, tags=["weights", "kv_cache"])
    assert core_of(engine).running and not engine.asleep


async def test_an_update_is_rejected_while_the_weights_sleep(engine: Engine) -> None:
    begin = Instruction(seq=1, kind=InstructionKind.BEGIN, args={"round_id": 1}, deadline_s=5.0)
    await call(engine, FleetOperation.SLEEP, level=1)
    with pytest.raises(Rejected, match=r"POST /wake_up\?tags=weights"):
        await EngineMember(engine).execute(begin)


async def test_resume_waits_for_the_memory_that_sleeps(engine: Engine) -> None:
    await call(engine, FleetOperation.SLEEP, level=1)
    await call(engine, FleetOperation.RESUME)
    assert not core_of(engine).running
    await call(engine, FleetOperation.WAKE_UP)
    assert core_of(engine).running


async def test_waking_up_ends_a_users_pause_as_it_does_in_vllm(engine: Engine) -> None:
    engine.paused_by_user = True
    await call(engine, FleetOperation.SLEEP, level=0)
    await call(engine, FleetOperation.WAKE_UP, tags=["scheduling"])
    await commit(engine)
    assert core_of(engine).running, "an update must not leave it paused for good"
