"""How far a replica's workers are with the staging, without asking them.

A question to the workers goes through the engine's loop and waits for the step that runs, and the next
step waits for the answer. So each worker's staging thread tells what it is through with in a page of
shared memory, and the follower looks there.
"""

import asyncio
from typing import Any

from deployments.replica.engine import Engine
from deployments.weights.staging.progress_page import StatePage
from deployments.weights.wire.shared_memory import remove_segment

LOOK_S = 0.001


class StagingProgress:
    def __init__(self, engine: Engine, page: StatePage) -> None:
        self._engine = engine
        self._page = page

    @classmethod
    async def open(cls, engine: Engine) -> "StagingProgress | None":
        """None if a worker is on another host: it has to be asked."""
        name, page = StatePage.create(engine.world_size)
        try:
            shared = await engine.workers("staging_report_to", page=name)
        finally:
            remove_segment(name)  # the mappings stay
        return cls(engine, page) if all(shared) else None

    def states(self) -> list[dict[str, Any]] | None:
        """What the workers told last (see `Session.state`); None if one has told nothing in this session."""
        states = [self._page.read(place) for place in range(len(self._page))]
        told = [state for state in states if state is not None]
        return told if len(told) == len(states) else None

    async def until(self, payloads: int) -> list[dict[str, Any]] | None:
        """Wait until every worker is through with so many payloads of its session, and return their states;
        None if the engine is dead."""
        while not self._engine.dead:
            states = self.states()
            if states is not None and all(state["payloads_done"] >= payloads for state in states):
                return states
            await asyncio.sleep(LOOK_S)
        return None
