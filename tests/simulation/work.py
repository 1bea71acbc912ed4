"""How long an engine's work takes, how it fails, and what an answer says."""

import asyncio
from dataclasses import dataclass
from random import Random

FIRST = "checkpoint"  # the weights that the fleet starts with


class EngineFailed(RuntimeError):
    """The replica failed: its weights may be uncertain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the first and the last token of an answer were computed with."""

    first: int  # versions of the base
    last: int
    tokens: tuple[tuple[str, str], ...] = ()  # (adapter's full name, what its files held)


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
