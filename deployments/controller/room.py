"""How many replicas the cluster's GPUs hold: asked of Ray, when somebody wants more."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import ray

ASK_S = 10.0

Room = Callable[[], Awaitable[int | None]]  # None: GPUs are no limit


async def no_limit() -> int | None:
    return None


class GpuRoom:
    """Counts the places for replicas on the nodes that are alive.

    Args:
        per_replica: GPUs of one; 0: they need none, or take slots.
        others: GPUs that the rest of the application uses.
    """

    def __init__(self, *, per_replica: float, others: float) -> None:
        self._per_replica = per_replica
        self._others = others

    async def __call__(self) -> int | None:
        if not self._per_replica:
            return None
        nodes = await asyncio.wait_for(asyncio.to_thread(_gpus), ASK_S)
        return places(nodes, self._per_replica, self._others)


def places(nodes: list[float], per_replica: float, others: float) -> int:
    """Places for replicas on nodes with so many GPUs; the other processes take as few places as they can."""
    return max(0, sum(math.floor(gpus / per_replica) for gpus in nodes) - math.ceil(others / per_replica))


def _gpus() -> list[float]:
    return [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
