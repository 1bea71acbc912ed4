"""How far a replica's workers are with the staging, without asking them.

A question to the workers goes through the engine's loop and waits for the step that runs, and the next
step waits for the answer. So each worker's staging thread counts the payloads that it is through with in
a page of shared memory, and the follower looks there.
"""

import asyncio

from deployments.engine import Engine
from deployments.weights.counters import Counters
from deployments.weights.segments import remove_segment

LOOK_S = 0.002


class StagingProgress:
    def __init__(self, engine: Engine, payloads: Counters) -> None:
        self._engine = engine
        self._payloads = payloads

    @classmethod
    async def open(cls, engine: Engine) -> "StagingProgress | None":
        """None if a worker is on another host: it has to be asked."""
        name, payloads = Counters.create(engine.world_size)
        try:
            shared = await engine.workers("staging_report_to", page=name)
        finally:
            remove_segment(name)  # the mappings stay
        return cls(engine, payloads) if all(shared) else None

    async def until(self, payloads: int) -> None:
        """Wait until every worker is through with so many payloads of its session, or the engine is dead."""
        while not self._engine.dead:
            if all(self._payloads[place] >= payloads for place in range(len(self._payloads))):
                return
            await asyncio.sleep(LOOK_S)
