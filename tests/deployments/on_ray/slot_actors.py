"""Actors that take GPUs. Each of their processes imports what this module imports."""

import os
from typing import Any

import ray

from deployments.serve.placement import VISIBLE_DEVICES, take_slot, use_gpus


class Replica:
    """What a replica does before it starts its engine."""

    async def __init__(self, slots: Any) -> None:  # type: ignore[misc]
        self._slot = await take_slot(await slots.plan.remote())
        use_gpus(self._slot)

    def slot(self) -> tuple[int, str, int]:
        return self._slot.index, os.environ[VISIBLE_DEVICES], os.getpid()


class Rank:
    def gpu(self) -> tuple[str, int]:
        (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return gpu, os.getpid()
