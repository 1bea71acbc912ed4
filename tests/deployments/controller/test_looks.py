"""When the controller looks at what follows from reports: once for all that come together."""

import asyncio
import time

import pytest

from tests.deployments.controller.fleet import Fleet, publish


async def test_replicas_that_join_together_are_looked_at_together(fleet: Fleet) -> None:
    names = [f"r{number}" for number in range(40)]
    fleet.start(*names)
    await fleet.admitted(*names)
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
    fleet.start("a")
    await fleet.admitted("a")
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
