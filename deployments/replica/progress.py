"""The progress of a replica's workers, read without a call to them.

A call to the workers goes through the engine's loop and waits for the running step, and the next step waits
for the answer. So each worker's staging thread writes its state to a page of shared memory, which is polled
here.
"""

import asyncio

from deployments.replica.engine import Engine
from deployments.weights.staging.progress_page import ProgressPage
from deployments.weights.staging.reports import StagingState
from deployments.weights.wire.shared_memory import remove_segment

POLL_S = 0.001


class StagingProgress:
    """The states of all workers of an engine."""

    def __init__(self, engine: Engine, page: ProgressPage) -> None:
        self._engine = engine
        self._page = page

    @classmethod
    async def open(cls, engine: Engine) -> "StagingProgress | None":
        """None if a worker is on another host: it has to be called.

        Raises:
            OSError: there is no room in shared memory.
        """
        name, page = ProgressPage.create(engine.world_size)
        try:
            shared = await engine.workers("staging_report_to", page=name)
        finally:
            remove_segment(name)  # the mappings stay
        return cls(engine, page) if all(shared) else None

    def states(self) -> list[StagingState] | None:
        """The last states, by worker; None if one has written none in this update."""
        states = [self._page.read(index) for index in range(len(self._page))]
        written = [state for state in states if state is not None]
        return written if len(written) == len(states) else None

    async def until(self, payloads: int) -> list[StagingState] | None:
        """Wait until every worker has finished so many payloads of its update; None if the engine is dead."""
        while not self._engine.dead:
            states = self.states()
            if states is not None and all(state.payloads_done >= payloads for state in states):
                return states
            await asyncio.sleep(POLL_S)
        return None
