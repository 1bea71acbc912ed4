"""What a fleet has left behind, told from what others hold beside it."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.settings.config import parse_config
from tests.chaos.faults import Phase, cases
from tests.chaos.launching import MARK, SETTINGS, left_behind
from tests.environment import users_environment
from tests.fleet.deployed import merged, settings

OWN_NAMES = """
import sys, time
from multiprocessing import shared_memory
from deployments.host.shared_memory import DIRECTORY, owner
print(owner().id, flush=True)
(DIRECTORY / owner().name("segment")).write_bytes(b"x")
segment = shared_memory.SharedMemory(create=True, size=1, name=f"psm_{owner().id}")
print(segment.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["another's", "ours"])
def names(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str, bool]]:
    """A process that owns names in /dev/shm: a fleet's mark, its own id, and whether it is of the fleet."""
    mark = uuid.uuid4().hex
    ours = request.param == "ours"
    environment = users_environment(**({MARK: mark} if ours else {}))
    with subprocess.Popen(
        [sys.executable, "-c", OWN_NAMES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        try:
            owner = process.stdout.readline().strip()
            assert process.stdout.readline()
            yield mark, owner, ours
        finally:
            process.kill()
    for path in Path("/dev/shm").glob(f"*{owner}*"):
        path.unlink(missing_ok=True)


def test_names_that_another_process_holds_are_not_leaks(names: tuple[str, str, bool], tmp_path: Path) -> None:
    mark, owner, ours = names
    before = {path.name for path in Path("/dev/shm").iterdir() if owner not in path.name}
    left = [each for each in left_behind(mark, before, tmp_path, patience_s=0.0) if owner in each]
    assert len(left) == (3 if ours else 0), left


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
