"""One schedule from its seed: run it, and say what was wrong, with a trace."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.simulation.faults import Faults
from tests.simulation.oracle import Violation
from tests.simulation.world import World, quiet

RECOVERY_S = 60.0  # virtual, from the end of the faults to full strength and another round
REPLAY = "python -m tests.simulation {seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seed: int
    problem: str | None
    steps: int
    messages: int
    virtual_s: float
    committed: int
    answers: int
    trace: tuple[str, ...] = ()

    @property
    def replay(self) -> str:
        return REPLAY.format(seed=self.seed)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Around many schedules: nothing is collected while one runs.

    What a collection ends of dead processes would end at another step each time, and what they did not get to
    do in their `finally` is no error.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    frozen = gc.get_freeze_count() > 0  # by the tests' process, which keeps it so
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        if not frozen:
            gc.unfreeze()
        gc.enable()
        sys.unraisablehook = hook


def run(seed: int, *, trace: bool = False, situation: str | None = None) -> Outcome:
    """Run one schedule. The same seed gives the same outcome, whatever ran before it."""
    quiet()
    world = World(seed, trace=trace)
    problem = None
    try:
        calm_s = Faults(world).plan(situation)
        world.start()
        world.run(lambda: False, calm_s + 0.001)
        before = world.oracle.durable
        recovered = world.run(lambda: world.at_full_strength(before + 1), calm_s + RECOVERY_S)
        if not recovered:
            problem = f"not at full strength {RECOVERY_S:g} s after the last fault: {world.describe()}"
    except Violation as violation:
        problem = str(violation)
    finally:
        world.close()
    return Outcome(
        seed=seed,
        problem=problem,
        steps=world.loop.steps,
        messages=world.network.messages,
        virtual_s=world.loop.now,
        committed=world.oracle.durable,
        answers=world.oracle.answers,
        trace=tuple(world.trace or ()),
    )
