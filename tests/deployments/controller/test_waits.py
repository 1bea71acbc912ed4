import asyncio
import time
from itertools import pairwise

import pytest

from deployments.controller.durable_ledger import WAKE_AT_ONCE, Waits
from tests.deployments.controller.fleet import Fleet, publish


async def test_a_change_wakes_only_waits_that_are_over() -> None:
    waits, over = Waits(), {1: False, 2: False}
    waiting = {each: asyncio.create_task(waits.wait(lambda each=each: over[each], None)) for each in over}
    await asyncio.sleep(0)
    over[1] = True
    waits.look_soon()
    await asyncio.wait_for(waiting[1], 5)
    assert not waiting[2].done()
    waiting[2].cancel()


async def test_simultaneous_changes_cause_one_look() -> None:
    waits, looks = Waits(), 0

    def ready() -> bool:
        nonlocal looks
        looks += 1
        return looks > 2

    waiting = asyncio.create_task(waits.wait(ready, None))
    await asyncio.sleep(0)
    for _ in range(10):
        waits.look_soon()
    await asyncio.sleep(0.01)
    assert looks == 2 and not waiting.done()
    waits.look_soon()
    await asyncio.wait_for(waiting, 5)


async def test_other_tasks_run_between_woken_waits() -> None:
    waits, over = Waits(), False
    woken = 0

    async def wait() -> None:
        nonlocal woken
        await waits.wait(lambda: over, None)
        woken += 1

    tasks = [asyncio.create_task(wait()) for _ in range(5 * WAKE_AT_ONCE)]
    await asyncio.sleep(0)
    over = True
    waits.look_soon()
    seen = []
    while woken < len(tasks):
        await asyncio.sleep(0)
        seen.append(woken)
    assert max(after - before for before, after in pairwise(seen)) <= WAKE_AT_ONCE


async def test_a_wait_ends_on_timeout_on_its_own_error_and_with_all_waits() -> None:
    waits, broken = Waits(), False

    def ready() -> bool:
        if broken:
            raise ValueError("mine")
        return False

    await waits.wait(ready, 0.01)
    failing = asyncio.create_task(waits.wait(ready, None))
    ended = asyncio.create_task(waits.wait(lambda: False, None))
    await asyncio.sleep(0)
    broken = True
    waits.look_soon()
    with pytest.raises(ValueError, match="mine"):
        await asyncio.wait_for(failing, 5)
    waits.end_all()
    await asyncio.wait_for(ended, 5)


# When the controller looks at what follows from reports: once for all that come together.


async def test_replicas_that_join_together_are_looked_at_together(fleet: Fleet) -> None:
    names = [f"r{number}" for number in range(40)]
    await fleet.serve(*names)
    assert fleet.controller._durable.looks <= 2


async def test_a_look_that_fails_is_made_up_for_by_the_next_tick(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger, fails = fleet.controller._ledger, [True, True]
    advance = ledger.advance

    def sometimes(now: float) -> None:
        if fails:
            fails.pop()
            raise RuntimeError("injected")
        advance(now)

    monkeypatch.setattr(ledger, "advance", sometimes)
    await fleet.serve("a")
    assert (await publish(fleet)).phase == "committed"
    assert "failed to process reports" in caplog.text


async def test_after_a_stalled_look_the_next_one_comes_within_a_tick(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable, loop = fleet.controller._durable, asyncio.get_running_loop()
    advance = fleet.controller._ledger.advance

    def frozen(now: float) -> None:
        advance(now)
        time.sleep(0.3)  # the event loop stands still; a fifth of its time would be 1.2 s later

    monkeypatch.setattr(fleet.controller._ledger, "advance", frozen)
    durable.look_soon()
    await asyncio.sleep(0)
    while not durable.looks:
        await asyncio.sleep(0)
    assert durable._look_at <= loop.time() + durable._tick_s
