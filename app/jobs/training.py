"""A step and a round of the trainer, each done once although its answer may be lost.

the trainer dies     Serve starts another one, which resumes from the newest stored version: ask again; if it
                     died after a step and before its round, learn from the batch again
the router dies      the call goes on: the trainer's status says whether it was done
a round is aborted   the fleet serves what it served: publish again
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

PUBLISH_ATTEMPTS = 3
LOOK_S = 1.0  # how often the trainer is asked whether it still does what it was asked for
BUSY_S = 3600.0  # the trainer's own limits (`step_timeout_s`) end what it does long before

Result = TypeVar("Result")
Say = Callable[[str], object]


class StepLost(Exception):
    """The trainer went back since its step: a successor resumed from an older version."""


class Training:
    """The trainer behind a fleet's address.

    Args:
        patience_s: how long a call is repeated whose answer was lost.
        say: takes one line for a person.
    """

    def __init__(self, client: AsyncFleetClient, *, patience_s: float, say: Say) -> None:
        self._client = client
        self._patience_s = patience_s
        self._say = say

    async def step(self, trajectories: Sequence[Trajectory]) -> dict[str, JsonValue]:
        """One optimizer step; its metrics.

        Raises:
            FleetError: the fleet refuses, or does not answer for too long.
        """
        before = (await self._client.send(calls.train_status())).step

        async def metrics() -> dict[str, JsonValue] | None:
            status = await self.settled()
            return dict(status.last_step) if status.step == before + 1 else None

        return await self._once(calls.step(trajectories), metrics)

    async def publish(self, label: str, newer_than: int, step: int | None = None) -> int:
        """One round, or the next version of the adapter that is trained; the version that the fleet serves
        after it.

        Args:
            newer_than: the version before.
            step: optimizer steps that the trainer must have done; None: however many.

        Raises:
            StepLost: the trainer has done another number of steps.
            FleetError: the fleet refuses, every attempt was aborted, or nobody answers for too long.
        """

        async def report() -> RoundReport | AdapterReport | None:
            status = await self.settled()
            last = status.last_round if status.adapter is None else status.last_adapter
            own = last is not None and last.label == label and last.version > newer_than
            return last if own else None

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
        """Send a call that must be done once; `outcome` says what came of it, None if it was not done."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await self._client.send(call)
            except FleetError as error:
                if not is_unanswered(error) or time.monotonic() >= deadline:
                    raise
                self._say(f"{error}; asking the trainer whether it was done")
            found = await outcome()
            if found is not None:
                return found

    async def settled(self) -> TrainerStatus:
        """The trainer's status when it does nothing.

        Raises:
            FleetError: it is busy for too long, or nobody answers.
        """
        deadline = time.monotonic() + BUSY_S
        while True:
            status = await self._client.send(calls.train_status())
            if status.doing is None:
                return status
            if status.doing_s > BUSY_S or time.monotonic() > deadline:
                raise FleetError(
                    f"the trainer is not free, and has been busy with {status.doing!r} for "
                    f"{status.doing_s:.0f} s: look at its logs, and go on with --resume when it is free"
                )
            await asyncio.sleep(LOOK_S)


def is_unanswered(error: FleetError) -> bool:
    """Whether nobody knows if the call was carried out."""
    return error.status is None or error.type == "answer_lost"
