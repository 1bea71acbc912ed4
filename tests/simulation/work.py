"""How long an engine's work takes, how it fails, and what an answer says."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from random import Random
from typing import Any

FIRST = "checkpoint"  # the weights that the fleet starts with


class EngineFailed(RuntimeError):
    """The replica failed: its weights may be uncertain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the first and the last token of an answer were computed with."""

    first: int  # versions of the base
    last: int


@dataclass(slots=True)
class Work:
    """How engines of one schedule behave; faults are set from outside."""

    rng: Random
    fail: float = 0.0  # probability that an instruction fails
    hang: float = 0.0
    slow: float = 0.0
    flip: float = 0.0  # probability that a payload arrives damaged

    async def do(self, usually_s: float) -> None:
        seconds = usually_s * (0.5 + self.rng.random())
        if self.slow and self.rng.random() < self.slow:
            seconds += self.rng.uniform(1.0, 6.0)
        await asyncio.sleep(seconds)


class Mortal:
    """An engine's processes, which may end by themselves: what they do ends with them."""

    def __init__(self) -> None:
        self.stopped = False
        self.running = asyncio.Condition()  # notified when it may go on generating
        self._death = asyncio.Event()
        self._storing: asyncio.Task[None] | None = None

    @property
    def dead(self) -> bool:
        return self._death.is_set()

    async def die(self) -> None:
        self.stopped = True
        self._death.set()
        if self._storing is not None:
            self._storing.cancel()
        async with self.running:
            self.running.notify_all()

    async def died(self) -> str:
        await self._death.wait()
        return "its engine has died"

    async def while_alive(self, work: Awaitable[Any]) -> Any:
        """Raises EngineFailed when it dies."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._death.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.dead:
                raise EngineFailed("the engine has died")
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
