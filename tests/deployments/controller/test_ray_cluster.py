"""How many replicas the cluster's GPUs hold."""

import pytest

from deployments.controller.ray_cluster import GpuCapacity, replicas_on


@pytest.mark.parametrize(
    ("nodes", "per_replica", "others", "held"),
    [
        ([8.0], 2.0, 0.0, 4),
        ([8.0], 2.0, 1.0, 3),
        ([3.0, 3.0], 2.0, 0.0, 2),
        ([1.0], 0.4, 0.0, 2),
        ([0.0, 1.0], 1.0, 2.0, 0),
    ],
)
def test_a_replica_is_on_one_node(nodes: list[float], per_replica: float, others: float, held: int) -> None:
    assert replicas_on(nodes, per_replica, others) == held


async def test_replicas_without_gpus_are_not_limited() -> None:
    assert await GpuCapacity(per_replica=0.0, others=1.0)() is None
