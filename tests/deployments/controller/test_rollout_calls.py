"""Rollouts in the controller: staleness by the committed version, and what a successor finds."""

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.protocol.errors import InvalidRequest
from tests.deployments.controller.fleet import Fleet
from tests.deployments.rollouts.turns import LIMITS, captured, request


async def play(fleet: Fleet, rollout: str, version: int, adapter: str | None = None) -> None:
    controller = fleet.controller
    await controller.rollouts("open", request(rollout))
    turn = captured("k/0", [1], [2], version=version, adapter=adapter)
    await controller.rollouts("append", rollout, "", turn)
    await controller.rollouts("reward", rollout, "", 1.0)


async def take(fleet: Fleet, max_staleness: int) -> Any:
    return json.loads(await fleet.controller.rollouts("take", "step", "", 1, max_staleness, "", 0))


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
