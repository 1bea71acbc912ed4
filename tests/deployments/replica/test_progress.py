"""A replica reads in shared memory how far its workers' staging is."""

import asyncio
from typing import Any

from deployments.protocol.reports import Outcome
from deployments.replica.progress import StagingProgress
from deployments.weights.staging.progress_page import ProgressPage
from deployments.weights.staging.reports import StagingState
from deployments.weights.wire.shared_memory import DIRECTORY


class FakeEngine:
    """Two workers; `far` of them are on another host."""

    world_size = 2

    def __init__(self, far: int = 0) -> None:
        self.dead = False
        self._far = far
        self.pages: list[ProgressPage] = []

    async def workers(self, method: str, page: str) -> list[Any]:
        assert method == "staging_report_to"
        self.name = page
        self.pages = [ProgressPage.open(page) for _ in range(2 - self._far)]
        return [True] * (2 - self._far) + [False] * self._far


def state(payloads_done: int, message: str = "") -> StagingState:
    return StagingState(
        payloads_done=payloads_done,
        size_bytes=8,
        stage_s=0.5,
        verify_s=0.25,
        outcome=Outcome.DONE,
        message=message,
    )


async def opened(engine: FakeEngine) -> StagingProgress:
    progress = await StagingProgress.open(engine)  # type: ignore[arg-type]
    assert progress is not None
    return progress


async def test_it_waits_for_the_last_worker() -> None:
    engine = FakeEngine()
    progress = await opened(engine)
    engine.pages[0].write(0, state(1))
    assert progress.states() is None, "one worker has written nothing"
    waiting = asyncio.create_task(progress.until(1))
    engine.pages[1].write(1, state(0))
    await asyncio.sleep(0.01)  # longer than it polls
    assert not waiting.done()
    engine.pages[1].write(1, state(1, "wrong"))
    assert await asyncio.wait_for(waiting, 5) == [state(1), state(1, "wrong")] == progress.states()
    engine.pages[1].write(1, None)  # another update
    assert progress.states() is None


async def test_a_dead_engine_ends_the_wait() -> None:
    engine = FakeEngine()
    progress = await opened(engine)
    waiting = asyncio.create_task(progress.until(1))
    engine.dead = True
    assert await asyncio.wait_for(waiting, 5) is None


async def test_workers_of_another_host_have_to_be_called() -> None:
    engine = FakeEngine(far=1)
    assert await StagingProgress.open(engine) is None  # type: ignore[arg-type]
    assert not (DIRECTORY / engine.name).exists()
