"""What a fleet has left behind is found, and the cases are those that are meant."""

import uuid
from pathlib import Path

from app.settings.config import parse_config
from tests.chaos.faults import Phase, cases
from tests.chaos.launching import SETTINGS, left_behind
from tests.fleet.deployed import merged, settings


def test_a_name_without_a_holder_is_a_leak(tmp_path: Path) -> None:
    name = f"slipstream-{uuid.uuid4().hex}-psm-1"
    path = Path("/dev/shm") / name
    path.touch()
    try:
        assert f"/dev/shm/{name}" in left_behind("no fleet", set(), tmp_path, patience_s=0.0)
    finally:
        path.unlink()


def test_the_fleet_of_the_cases_has_settings_that_are_allowed() -> None:
    assert parse_config(merged(settings(Path("/model"), Path("/state")), SETTINGS)).engine.num_replicas == 2


def test_cases_have_names_of_their_own_and_cover_every_phase() -> None:
    every = cases()
    assert len({case.name for case in every}) == len(every)
    assert {case.phase for case in every} == set(Phase)
