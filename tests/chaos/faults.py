"""The cases as data: what is done to which process in which phase of a round."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum


class Phase(StrEnum):
    IDLE = "idle"
    STAGING = "staging"
    VERIFYING = "verifying"
    DECIDING = "deciding"  # the decision is on disk only
    COMMITTING = "committing"
    RELEASING = "releasing"
    STORING = "storing"


class Action(StrEnum):
    KILL = "kill"
    STOP_5_S = "stop5"
    STOP_45_S = "stop45"
    CUT = "cut"  # its TCP connections break


STOPPED_S = {Action.STOP_5_S: 5.0, Action.STOP_45_S: 45.0}
# An engine's worker is its core's process here (app/main.py), as on one GPU.
TARGETS = (
    "replica",
    "engine",
    "controller",
    "router",
    "trainer",
    "trainer_worker",
    "publisher",
    "serve_controller",
)
# Both are killed, the second one at once after the first.
PAIRS = (
    ("engine", "controller"),
    ("replica", "trainer"),
    ("replica", "publisher"),
    ("engine", "router"),
    ("controller", "router"),
    ("controller", "publisher"),
    ("serve_controller", "replica"),
)
OF_REPLICA = ("replica", "engine")
OF_TRAINER = ("trainer", "trainer_worker")
# What a request passes: with it the requests that are in it end.
IN_THE_WAY = ("router",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault in one phase."""

    targets: tuple[str, ...]
    action: Action
    phase: Phase

    @property
    def may_lose(self) -> int:
        """Replicas: those that it takes away, or that stand still for longer than the fleet waits."""
        if self.action in (Action.STOP_5_S, Action.CUT):
            return 0
        return int(any(target in OF_REPLICA for target in self.targets))

    @property
    def name(self) -> str:
        return f"{self.action}-{'+'.join(self.targets)}-{self.phase}"


def cases() -> list[Case]:
    """All of them, in a fixed order: the long ones last."""
    singles = [(target,) for target in TARGETS]

    def each(action: Action, targets: Sequence[tuple[str, ...]]) -> list[Case]:
        return [Case(targets=those, action=action, phase=phase) for phase in Phase for those in targets]

    made = each(Action.KILL, singles) + each(Action.KILL, PAIRS)
    made += each(Action.CUT, [("replica",), ("controller",), ("router",)])
    made += each(Action.STOP_5_S, singles) + each(Action.STOP_45_S, singles)
    return [case for case in made if not _impossible(case)]


def chosen() -> list[Case]:
    """All cases, or so many as CHAOS_CASES says, drawn with the seed CHAOS_SEED or else with the date."""
    every, count = cases(), os.environ.get("CHAOS_CASES")
    if count is None:
        return every
    return sample(every, int(count), os.environ.get("CHAOS_SEED", f"{date.today()}"))


def sample(every: Sequence[Case], count: int, seed: str) -> list[Case]:
    """A few cases that are drawn with the seed: not two of the same target, and none that takes a minute."""
    drawn: dict[tuple[str, ...], Case] = {}
    quick = [case for case in every if case.action is not Action.STOP_45_S]
    for case in random.Random(seed).sample(quick, len(quick)):
        drawn.setdefault(case.targets, case)
        if len(drawn) == count:
            break
    return list(drawn.values())


def _impossible(case: Case) -> bool:
    """The trainer's rounds cannot be held at their end: they cannot be seen from outside."""
    return case.phase is Phase.VERIFYING and any(target in OF_TRAINER for target in case.targets)
