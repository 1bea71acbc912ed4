"""Calls in turn, and callers that go away."""

import asyncio

import pytest

from deployments.trainer.trainer import Turns


async def test_calls_run_one_at_a_time_in_their_order() -> None:
    turns, did = Turns(), []

    async def work(number: int) -> int:
        did.append(f"{number} begins")
        await asyncio.sleep(0)
        did.append(f"{number} ends")
        return number

    calls = [turns.take("step", lambda number=number: work(number)) for number in range(3)]
    assert await asyncio.gather(*calls) == [0, 1, 2]
    assert did == [f"{number} {word}" for number in range(3) for word in ("begins", "ends")]
    assert turns.doing is None and turns.doing_s == 0.0


async def test_a_call_that_has_begun_goes_on_without_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    turns, may_end = Turns(), asyncio.Event()
    steps = 0

    async def step() -> None:
        nonlocal steps
        await may_end.wait()
        steps += 1

    caller = asyncio.create_task(turns.take("step", step))
    await asyncio.sleep(0.01)
    with caplog.at_level("WARNING", "ray.serve"):
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    # A writer of an earlier test's trainer may still say that it has ended.
    assert [each.getMessage() for each in caplog.records if each.module == "trainer"] == [
        "the caller of 'step' is gone: the trainer goes on with it"
    ]
    assert turns.doing == "step", "the status says that it is not over"
    following = asyncio.create_task(turns.take("step", step))
    await asyncio.sleep(0.01)
    may_end.set()
    await following
    assert steps == 2


async def test_a_call_that_waits_ends_with_its_caller() -> None:
    turns, may_end = Turns(), asyncio.Event()
    did = []

    async def note(name: str) -> None:
        did.append(name)

    first = asyncio.create_task(turns.take("publish", may_end.wait))
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(turns.take("step", lambda: note("step")))
    await asyncio.sleep(0.01)
    waiting.cancel()
    may_end.set()
    await first
    await turns.take("save", lambda: note("save"))
    assert did == ["save"]


async def test_what_fails_without_its_caller_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    turns, may_end = Turns(), asyncio.Event()

    async def fail() -> None:
        await may_end.wait()
        raise ValueError("out of memory")

    caller = asyncio.create_task(turns.take("step", fail))
    await asyncio.sleep(0.01)
    caller.cancel()
    await asyncio.sleep(0.01)
    with caplog.at_level("WARNING", "ray.serve"):
        may_end.set()
        await asyncio.sleep(0.01)
    assert caplog.records[-1].getMessage() == "a call whose caller is gone has failed: out of memory"
    assert turns.doing is None


async def test_what_a_call_raises_is_its_callers() -> None:
    async def fail() -> None:
        raise ValueError("wrong batch")

    turns = Turns()
    with pytest.raises(ValueError, match="wrong batch"):
        await turns.take("step", fail)
    assert turns.doing is None
