"""How long a poll waits, by the size of the fleet."""

import pytest

from deployments.controller import pace
from deployments.controller.pace import Pace
from deployments.poll_line import POLL_TIMEOUT_S
from tests.deployments.ledger.ledger_scene import Scene


@pytest.mark.parametrize(
    ("heard_per_s", "heartbeat_s", "expected_s"),
    [
        (200.0, 30.0, 1.0),  # a small fleet: as configured
        (1.0, 30.0, 3.0),  # three replicas, each heard once in three seconds
        (0.1, 30.0, 7.5),  # but four times in the time after which it is lost
        (0.1, 600.0, pace.LONGEST_S),  # and before a replica gives the poll up
    ],
)
def test_a_poll_waits_longer_in_a_larger_fleet(
    heard_per_s: float, heartbeat_s: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "HEARD_PER_S", heard_per_s)
    scene = Scene(3, heartbeat_timeout_s=heartbeat_s)
    scene.poll()
    waits = Pace(scene.ledger, poll_s=1.0, silent_s=2.0)
    assert waits.wait_s(scene.replicas[0].report()) == expected_s
    assert waits.silent_s() == 1.0 + expected_s
    assert expected_s < POLL_TIMEOUT_S
