from typing import Any

import cloudpickle
import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments.serve import scaling
from deployments.serve.scaling import FleetScaling, ScalingStats

POLICY = FleetScaling(least=1, most=4, down_s=100)


def stats(requests: int = 0, *, kv_use: float = 0.0, places: int = 10, **fields: float) -> ScalingStats:
    running = min(requests, places)
    return ScalingStats(running=running, waiting=requests - running, places=places, kv_use=kv_use, **fields)


class Fleet:
    """Replicas that share a load equally, and the policy, every second."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.now = 1000.0
        self.state: dict[str, Any] = {}
        self.seen: list[int] = []

    def run(self, seconds: int, requests: int, **fields: float) -> int:
        for _ in range(seconds):
            self.now += 1
            share = [stats(requests // self.count, **fields)] * self.count
            self.count, self.state = POLICY.decide(share, target=self.count, now=self.now, state=self.state)
            self.seen.append(self.count)
        return self.count


@pytest.mark.parametrize(
    ("report", "demand"),
    [
        (stats(0), 0.0),
        (stats(5), 0.5),
        (stats(25), 2.5),
        (stats(2, kv_use=0.9), 0.9),
        (stats(20, kv_use=0.8), 2.0),
        (ScalingStats(running=2, waiting=2, places=10, kv_use=1.0), 2.0),
    ],
)
def test_demand_follows_the_scheduler_and_the_kv_cache(report: ScalingStats, demand: float) -> None:
    assert report.demand == pytest.approx(demand)


def test_a_load_that_lasts_adds_replicas() -> None:
    fleet = Fleet(1)
    assert fleet.run(9, 24) == 1
    assert fleet.run(3, 24) == 3
    assert fleet.run(20, 1000) == 4, "and never more than allowed"


def test_fewer_once_the_load_has_been_low_for_long() -> None:
    fleet = Fleet(4)
    assert fleet.run(99, 4) == 4
    assert fleet.run(5, 4) == 1


def test_one_peak_delays_scaling_down() -> None:
    fleet = Fleet(4)
    fleet.run(90, 4)
    fleet.run(1, 30)
    assert fleet.run(95, 4) == 4
    assert fleet.run(10, 4) == 1


def test_a_steady_load_at_the_edge_does_not_flap() -> None:
    fleet = Fleet(2)
    for requests in (15, 16, 17, 15) * 200:
        fleet.run(1, requests)
    assert len([1 for a, b in zip(fleet.seen, fleet.seen[1:], strict=False) if a != b]) <= 1


def test_the_operators_number_holds_until_it_changes() -> None:
    old, new = stats(100, wanted=1, wanted_number=1), stats(0, wanted=3, wanted_number=2)
    assert POLICY.decide([old, new], target=2, now=0, state={})[0] == 3
    assert POLICY.decide([stats(0, wanted=9, wanted_number=3)], target=2, now=0, state={})[0] == 4
    assert POLICY.decide([stats(0, wanted=0, wanted_number=4), new], target=3, now=0, state={})[0] == 3


def test_a_paused_fleet_says_nothing_about_its_load() -> None:
    fleet = Fleet(2)
    assert fleet.run(300, 1000, halted=1.0) == 2


def test_serve_carries_the_policy_without_our_code() -> None:
    """Serve pickles its module by value, so nothing in it may refer to another module of ours."""
    kwargs = {"least": 1, "most": 4, "down_s": 1.0}
    policy = AutoscalingPolicy(policy_function=FleetScaling, policy_kwargs=kwargs)
    config = AutoscalingConfig(min_replicas=1, max_replicas=4, policy=policy)
    definition = config.policy.get_serialized_policy_def()
    assert definition is not None and b"deployments.protocol" not in definition
    assert cloudpickle.loads(definition).__name__ == scaling.FleetScaling.__name__
