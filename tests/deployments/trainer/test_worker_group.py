"""Workers that are gone or hang, without Ray."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.protocol.errors import FleetUnavailable
from deployments.trainer.worker_group import WorkerGroup


class FakeWorker:
    """Where an actor handle is; `state` says how it answers."""

    def __init__(self, state: str = "up") -> None:
        self.state = state
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> "FakeWorker":
        self.asked.append(name)
        return self

    async def remote(self, *args: Any) -> int:
        if self.state == "hangs":
            await asyncio.Event().wait()
        if self.state == "gone":
            raise ActorDiedError
        return 7


async def test_a_group_whose_workers_answer_is_healthy() -> None:
    group = WorkerGroup([FakeWorker(), FakeWorker()])
    await group.ping()
    assert group.broken is None and await group.process_ids() == [7, 7]


@pytest.mark.parametrize(
    ("state", "words"), [("hangs", "rank 1 has not answered for 0.05 s"), ("gone", "rank 1 is gone")]
)
async def test_a_worker_that_is_lost_is_named_in_one_line_and_the_group_is_broken(
    state: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    group = WorkerGroup([FakeWorker(), FakeWorker(state)], ping_timeout_s=0.05)
    with caplog.at_level("ERROR", "ray.serve"):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"the trainer's worker group is broken: {words}"):
                await group.ping()
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith(f"replacing the trainer, which resumes from the store: {words}")
    with pytest.raises(FleetUnavailable, match=words):
        await group.call("step", [], timeout_s=1.0)


async def test_a_hung_worker_does_not_hold_the_question_for_process_ids() -> None:
    with pytest.raises(TimeoutError):
        await WorkerGroup([FakeWorker("hangs")], ping_timeout_s=0.05).process_ids()


async def test_a_version_is_written_to_its_end_though_another_rank_is_lost() -> None:
    workers = [FakeWorker(), FakeWorker("gone")]
    group = WorkerGroup(workers)
    with pytest.raises(FleetUnavailable):
        await group.call("step", [], timeout_s=1.0)
    await group.flush(1.0)
    assert [each.asked for each in workers] == [["call", "store_status", "flush_version"], ["call"]]


async def test_a_stop_waits_for_the_disk_and_not_for_a_step() -> None:
    """A `call` queues behind a step; a step whose collective hangs would hold a stop for minutes."""
    workers = [FakeWorker(), FakeWorker()]
    await WorkerGroup(workers).flush(1.0)
    assert [each.asked for each in workers] == [["store_status", "flush"], ["flush"]]


async def test_a_rank_0_that_hangs_is_not_waited_for() -> None:
    group = WorkerGroup([FakeWorker("hangs")], ping_timeout_s=0.05)
    group.broken = "it hangs"
    with pytest.raises(FleetUnavailable):
        await group.flush(1000.0)
