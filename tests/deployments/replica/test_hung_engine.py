"""An engine that answers nothing any more: the replica is fenced at once, and its processes end."""

import asyncio
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.protocol.poll import Directive, Instruction, Report
from deployments.replica.follower import Follower
from deployments.replica.member import StagedMember
from deployments.replica.replica_engine import ReplicaEngine
from tests.deployments.replica.round_instructions import COMMIT


class HungLlm:
    """Stands where an AsyncLLM does whose engine core has stopped for good."""

    errored = False  # which vLLM does not notice

    def __init__(self, process: BaseProcess, *, shutdown_hangs: bool) -> None:
        self.ended = threading.Event()
        if not shutdown_hangs:
            self.ended.set()
        self.shutdowns = 0
        self.told: list[Exception] = []  # what running requests heard
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, world_size_across_dp=1)
        )
        manager = SimpleNamespace(processes=[process])
        self.engine_core = SimpleNamespace(
            resources=SimpleNamespace(engine_manager=manager), call_utility_async=self._never
        )
        self.output_processor = SimpleNamespace(propagate_error=self.told.append)

    async def collective_rpc(self, method: str, kwargs: Any) -> list[Any]:
        return await self._never()

    def shutdown(self, timeout: float) -> None:
        self.shutdowns += 1
        assert self.ended.wait(60.0)

    async def _never(self, *args: Any) -> list[Any]:
        await asyncio.Event().wait()
        return []


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


@pytest.fixture
def process() -> Iterator[BaseProcess]:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600.0,))
    process.start()
    yield process
    process.kill()
    process.join(10)


async def engine_of(llm: HungLlm) -> ReplicaEngine:
    engine = ReplicaEngine(llm, FastAPI(lifespan=lifespan), version=3)  # type: ignore[arg-type]
    await engine._lifespan.__aenter__()
    return engine


async def test_replica_with_a_hung_engine_is_fenced(process: BaseProcess) -> None:
    llm = HungLlm(process, shutdown_hangs=False)
    member = StagedMember(await engine_of(llm))
    commit = Instruction(seq=1, body=COMMIT, deadline_s=60.0)
    directives = iter(
        [
            Directive(admitted=True, instructions=(commit,)),
            Directive(admitted=False, fenced="missed the deadline"),
        ]
    )

    async def poll(report: Report) -> Directive:
        return next(directives)

    follower = Follower(
        replica_id="r", incarnation="i", member=member, poll=poll, heartbeat_s=0.02, retry_s=0.01
    )
    await asyncio.wait_for(follower.run(), 10)
    assert (member.fenced, member.admitted, llm.shutdowns) == ("missed the deadline", False, 1)
    assert [type(error) for error in llm.told] == [EngineDeadError], "running requests must hear of it"
    await asyncio.to_thread(process.join, 10)
    assert process.exitcode is not None


async def test_engine_processes_that_do_not_exit_are_killed(
    process: BaseProcess, caplog: pytest.LogCaptureFixture
) -> None:
    llm = HungLlm(process, shutdown_hangs=True)
    engine = await engine_of(llm)
    try:
        with caplog.at_level("WARNING", "ray.serve"):
            await asyncio.wait_for(engine.stop(limit_s=0.05), 10)
        await asyncio.to_thread(process.join, 10)
        assert process.exitcode is not None
        assert "engine did not exit within 0.05 s, killing its processes" in caplog.messages
    finally:
        llm.ended.set()
