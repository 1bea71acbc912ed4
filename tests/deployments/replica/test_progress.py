"""The follower sees in shared memory how far the workers' staging is."""

import asyncio
from typing import Any

import pytest

from deployments.replica.progress import StagingProgress
from deployments.weights.staging.progress_page import StatePage
from deployments.weights.transports.counters import ABSENT, Counters
from deployments.weights.wire.shared_memory import DIRECTORY, remove_segment


class FakeEngine:
    """Two workers; `far` of them are on another host."""

    world_size = 2

    def __init__(self, far: int = 0) -> None:
        self.dead = False
        self._far = far
        self.pages: list[StatePage] = []

    async def workers(self, method: str, page: str) -> list[Any]:
        assert method == "staging_report_to"
        self.name = page
        self.pages = [StatePage.open(page) for _ in range(2 - self._far)]
        return [True] * (2 - self._far) + [False] * self._far


def state(payloads_done: int, message: str = "") -> dict[str, Any]:
    return {"payloads_done": payloads_done, "message": message}


async def test_it_waits_for_the_last_worker() -> None:
    engine = FakeEngine()
    progress = await StagingProgress.open(engine)  # type: ignore[arg-type]
    assert progress is not None
    engine.pages[0].write(0, state(1))
    waiting = asyncio.create_task(progress.until(1))
    await asyncio.sleep(0.02)
    assert not waiting.done() and progress.states() is None
    engine.pages[1].write(1, state(0))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    engine.pages[1].write(1, state(1, "wrong"))
    assert await asyncio.wait_for(waiting, 5) == [state(1), state(1, "wrong")] == progress.states()
    engine.pages[1].write(1, None)  # another session
    assert progress.states() is None


async def test_a_dead_engine_ends_the_wait() -> None:
    engine = FakeEngine()
    progress = await StagingProgress.open(engine)  # type: ignore[arg-type]
    assert progress is not None
    waiting = asyncio.create_task(progress.until(1))
    await asyncio.sleep(0.02)
    engine.dead = True
    assert await asyncio.wait_for(waiting, 5) is None


async def test_workers_of_another_host_have_to_be_asked() -> None:
    engine = FakeEngine(far=1)
    assert await StagingProgress.open(engine) is None  # type: ignore[arg-type]
    assert not (DIRECTORY / engine.name).exists()


def test_a_state_that_is_just_being_written_is_not_read() -> None:
    name, page = StatePage.create(2)
    remove_segment(name)
    page.write(1, state(1))
    page._words[page._number(1)] += 1  # as between the first and the last step of `write`
    assert page.read(1) is None
    page._words[page._number(1)] += 1
    assert page.read(1) == state(1) and page.read(0) is None


def test_the_longest_message_stays_in_its_slot() -> None:
    name, page = StatePage.create(2)
    remove_segment(name)
    page.write(1, state(7))
    page.write(0, state(1, "\N{SNOWMAN}" * 100_000))
    told = page.read(0)
    assert told is not None and told["message"].startswith("\N{SNOWMAN}" * 1000)
    assert page.read(1) == state(7)


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
