"""How long an engine's work takes, and how it fails."""

import asyncio
from dataclasses import dataclass
from random import Random


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
