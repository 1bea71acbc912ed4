"""What can be wrong with the cases before a fleet is started."""

from pathlib import Path

from app.settings.config import parse_config
from tests.chaos.faults import Phase, cases
from tests.chaos.launching import SETTINGS
from tests.fleet.deployed import merged, settings


def test_the_fleet_of_the_cases_has_settings_that_are_allowed() -> None:
    assert parse_config(merged(settings(Path("/model"), Path("/state")), SETTINGS)).engine.num_replicas == 2


def test_cases_have_names_of_their_own_and_cover_every_phase() -> None:
    every = cases()
    assert len({case.name for case in every}) == len(every)
    assert {case.phase for case in every} == set(Phase)
