"""What engines name in /dev/shm goes with them, however they end."""

import time

import psutil
import pytest

from deployments.replica.parent_death import OWNER
from deployments.weights.wire.ownership import DIRECTORY
from tests.fleet.losing import (
    a_replica,
    engine_of,
    kill_a_replica,
    kill_with_workers,
    members,
    wait_for_another,
)
from tests.fleet.session_fleet import Fleet

pytestmark = [pytest.mark.serve, pytest.mark.timeout(700)]
_PATIENCE_S = 30.0


def names_of(owner: str) -> list[str]:
    return sorted(path.name for path in DIRECTORY.iterdir() if owner in path.name)


def owner_of(replica: psutil.Process) -> str:
    return str(engine_of(replica).environ()[OWNER])


def wait_until_gone(owner: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while names_of(owner):
        assert time.monotonic() < deadline, names_of(owner)
        time.sleep(0.5)


def test_a_replacement_removes_what_a_killed_engine_and_a_killed_replica_have_named(fleet: Fleet) -> None:
    with fleet.client() as client:
        for kill in (lambda: kill_with_workers(engine_of(a_replica())), kill_a_replica):
            before = members(client)
            replica = a_replica()
            owner = owner_of(replica)
            assert names_of(owner), "the engine's sockets; its queues, if it has workers: test_parent_death"
            for process in replica.children(recursive=True):
                with open(f"/proc/{process.pid}/maps") as maps:
                    assert "/dev/shm/psm_" not in maps.read(), "a segment without an owner"
            kill()
            wait_for_another(client, before)
            wait_until_gone(owner)
            assert names_of(owner_of(a_replica())), "a living replica keeps its names"
