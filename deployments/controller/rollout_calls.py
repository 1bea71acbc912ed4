"""The rollouts' store in its own thread: a slow disk delays neither decisions nor polls."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from deployments.protocol.errors import FleetUnavailable, InvalidRequest
from deployments.protocol.rollouts import RolloutLimits
from deployments.rollouts.store import RolloutStore

DISK_S = 60.0


class Rollouts:
    """Raises JournalError: the file cannot be used. `limits` None: no rollout is captured."""

    def __init__(self, directory: Path, limits: RolloutLimits | None, fleet_id: str) -> None:
        self._store = None if limits is None else RolloutStore(directory, limits, fleet_id)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")

    async def call(self, name: str, current: Mapping[str, int], *arguments: Any) -> Any:
        """A method of `RolloutStore`, whose changes are on the disk; the JSON of `take` is bytes.

        Args:
            current: versions by policy.

        Raises:
            InvalidRequest: rollouts are off.
            FleetUnavailable: the disk hangs or is full. The call may be sent again.
        """
        if self._store is None:
            raise InvalidRequest(
                "this fleet captures no rollouts: expected the section 'rollouts' in its settings, got none"
            )
        if name == "take":
            arguments = (*arguments, current)
        work = partial(getattr(self._store, name), *arguments)
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, work)
        try:
            async with asyncio.timeout(DISK_S):
                answer = await asyncio.shield(done)
                await loop.run_in_executor(self._thread, self._store.sync)  # after all that wait by now
                return answer
        except TimeoutError:
            done.cancel()
            raise FleetUnavailable(f"the disk of the rollouts has not answered for {DISK_S:g} s") from None

    async def aclose(self) -> None:
        if self._store is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown(wait=False)
