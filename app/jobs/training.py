"""Steps and publishes of the trainer, each done once although its answer may be lost.

trainer dies      Serve starts another one, which resumes from the committed version. A step without its
                  publish is repeated. Without the version it refuses everything, and the job ends.
router dies       the trainer's status says whether the call was done
round aborted     publish again
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import JsonValue

from app.client import calls
from app.client.connection import AsyncFleetClient, Call, FleetError
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import AdapterReport, TrainerStatus
from trainers.trajectory import Trajectory

PATIENCE_S = 300.0  # limit of repeated calls: a replica may be replaced
PUBLISH_ATTEMPTS = 3
POLL_S = 1.0
BUSY_S = 3600.0  # `step_timeout_s` ends its work before

Result = TypeVar("Result")
Say = Callable[[str], object]


class StepLost(Exception):
    """The trainer resumed from a version before its last step."""


class Training:
    def __init__(self, client: AsyncFleetClient, say: Say) -> None:
        self._client = client
        self._say = say

    async def step(
        self, trajectories: Sequence[Trajectory], before: int, settings: str | None = None
    ) -> dict[str, JsonValue]:
        """One optimizer step after `before` steps; its metrics. `settings` as in `calls.step`. Raises
        FleetError."""

        async def metrics() -> dict[str, JsonValue] | None:
            status = await self.idle()
            return dict(status.last_step) if status.step == before + 1 else None

        return await self._once(calls.step(trajectories, settings), metrics)

    async def publish(self, label: str, newer_than: int, step: int | None = None) -> int:
        """Publish weights or adapter; returns the new version, above `newer_than`.

        Raises:
            StepLost: the trainer has not done `step` steps (None: any number).
            FleetError: the fleet refuses, every attempt was aborted, or nothing answers for too long.
        """

        async def report() -> RoundReport | AdapterReport | None:
            return last_publish(await self.idle(), label, newer_than)

        for attempt in range(1, PUBLISH_ATTEMPTS + 1):
            try:
                return (await self._once(calls.publish(label, step), report)).version
            except FleetError as error:
                if error.type == "other_step":
                    raise StepLost(error.message) from error
                if error.type != "round_aborted" or attempt == PUBLISH_ATTEMPTS:
                    raise
                self._say(f"the round was aborted, trying again: {error}")
        raise AssertionError("unreachable")

    async def _once(self, call: Call[Result], outcome: Callable[[], Awaitable[Result | None]]) -> Result:
        """Send a call; `outcome` finds the result of one whose answer was lost, None if it was not done."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await self._client.send(call)
            except FleetError as error:
                is_lost = error.status is None or error.type == "answer_lost"
                if not is_lost or time.monotonic() >= deadline:
                    raise
                self._say(f"{error}; asking the trainer whether it was done")
            found = await outcome()
            if found is not None:
                return found

    async def idle(self) -> TrainerStatus:
        deadline = time.monotonic() + BUSY_S
        while True:
            status = await self._client.send(calls.train_status())
            if status.doing is None:
                return status
            if status.doing_s > BUSY_S or time.monotonic() > deadline:
                raise FleetError(
                    f"the trainer is not free, and has been busy with {status.doing!r} for "
                    f"{status.doing_s:.0f} s: look at its logs, and continue with --resume when it is free"
                )
            await asyncio.sleep(POLL_S)


def last_publish(status: TrainerStatus, label: str, newer_than: int) -> RoundReport | AdapterReport | None:
    """The last publish with this label and a newer version."""
    last = status.last_round if status.adapter is None else status.last_adapter
    return last if last is not None and last.label == label and last.version > newer_than else None
