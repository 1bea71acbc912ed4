"""Rollouts in the controller: staleness by the committed version, and what a successor finds."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from deployments.protocol.errors import InvalidRequest
from deployments.rollouts.store import Rollouts
from tests.deployments.controller.fleet import Fleet
from tests.deployments.rollouts.turns import LIMITS, captured, request


async def play(fleet: Fleet, rollout: str, version: int, adapter: str | None = None) -> None:
    controller = fleet.controller
    await controller.rollouts("open", request(rollout))
    turn = captured("k/0", [1], [2], version=version, adapter=adapter)
    await controller.rollouts("append", "", [(rollout, turn)])
    await controller.rollouts("reward", rollout, "", 1.0)


async def take(fleet: Fleet, max_staleness: int) -> Any:
    return json.loads(await fleet.controller.rollouts("take", "step", "", 1, max_staleness, 0))


async def test_staleness_is_counted_from_the_committed_version(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, rollouts=LIMITS)
    try:
        await fleet.serve("a")
        await play(fleet, "fresh", 0)
        await play(fleet, "gone", 0, "math@1")
        taken = await take(fleet, 0)
        assert [each["group"] for each in taken["groups"]] == ["~fresh"] and taken["stale_groups"] == 1
    finally:
        await fleet.aclose()


async def test_without_the_setting_they_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="expected the section 'rollouts'"):
        await fleet.controller.rollouts("open", request("a"))
    assert not list((tmp_path / "state").glob("captured*"))


async def test_calls_that_wait_for_the_disk_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = Rollouts(tmp_path, LIMITS.model_copy(update={"max_rollouts": 1000}), "fleet")
    syncs, answered, may_sync = [0], 0, threading.Event()

    def slow(path: Path) -> None:
        assert may_sync.wait(10)
        syncs[0] += 1

    monkeypatch.setattr("deployments.rollouts.store.sync", slow)

    async def opened(name: str) -> None:
        nonlocal answered
        await rollouts.call("open", {}, request(name))
        answered += 1

    async with asyncio.TaskGroup() as group:
        for index in range(200):
            group.create_task(opened(f"r{index}"))
        await asyncio.sleep(0.2)
        assert not answered, "none is on the disk"
        may_sync.set()
    assert answered == 200 and syncs[0] <= 2
    await rollouts.aclose()
