"""The follower sees in shared memory how far the workers' staging is."""

import asyncio
from typing import Any

import pytest

from deployments.progress import StagingProgress
from deployments.weights.counters import ABSENT, Counters
from deployments.weights.segments import DIRECTORY


class FakeEngine:
    """Two workers; `far` of them are on another host."""

    world_size = 2

    def __init__(self, far: int = 0) -> None:
        self.dead = False
        self._far = far
        self.pages: list[Counters] = []

    async def workers(self, method: str, page: str) -> list[Any]:
        assert method == "staging_report_to"
        self.name = page
        self.pages = [Counters.open(page) for _ in range(2 - self._far)]
        for place, counters in enumerate(self.pages):
            counters[place] = 0
        return [True] * (2 - self._far) + [False] * self._far


async def test_it_waits_for_the_last_worker() -> None:
    engine = FakeEngine()
    progress = await StagingProgress.open(engine)  # type: ignore[arg-type]
    assert progress is not None
    engine.pages[0][0] = 1
    waiting = asyncio.create_task(progress.until(1))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    engine.pages[1][1] = 1
    await asyncio.wait_for(waiting, 5)


async def test_a_dead_engine_ends_the_wait() -> None:
    engine = FakeEngine()
    progress = await StagingProgress.open(engine)  # type: ignore[arg-type]
    assert progress is not None
    waiting = asyncio.create_task(progress.until(1))
    await asyncio.sleep(0.02)
    engine.dead = True
    await asyncio.wait_for(waiting, 5)


async def test_workers_of_another_host_have_to_be_asked() -> None:
    engine = FakeEngine(far=1)
    assert await StagingProgress.open(engine) is None  # type: ignore[arg-type]
    assert not (DIRECTORY / engine.name).exists()


def test_counters_begin_absent_and_outlive_their_name() -> None:
    name, ours = Counters.create(3)
    theirs = Counters.open(name)
    (DIRECTORY / name).unlink()
    assert [theirs[place] for place in range(len(theirs))] == [ABSENT] * 3
    theirs[1] = 1 << 40
    assert ours[1] == 1 << 40
    with pytest.raises(ValueError, match="does not exist on this host"):
        Counters.open(name)
    with pytest.raises(ValueError, match="expected the name of a Slipstream segment, got '/etc/passwd'"):
        Counters.open("/etc/passwd")
