"""The state of a run, and the producers that fill its queue."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.jobs.attempts import Attempt
from app.jobs.environments.environment import Environment
from app.jobs.evaluation import Evaluation
from app.jobs.groups import Group, GroupQueue
from app.jobs.options import Options
from app.jobs.rollouts import Policy, Unanswered
from app.jobs.training import Say, Training
from trainers.advantages import overlong_penalty


@dataclass
class Positions:
    """The numbers of problems: handed out in order, consumed in any order.

    A problem is consumed when the trainer has learned from its answers, or when these were dropped. What was
    handed out and not consumed when a job ended is handed out again to the next.

    Args:
        next_problem: every problem before it is consumed.
        ahead: consumed ones after it.
    """

    next_problem: int = 0
    ahead: set[int] = field(default_factory=set)
    _handed_out: int = -1

    def __post_init__(self) -> None:
        self._handed_out = self.next_problem - 1

    def hand_out(self) -> int:
        """The next problem that is neither consumed nor in flight."""
        self._handed_out += 1
        while self._handed_out in self.ahead:
            self._handed_out += 1
        return self._handed_out

    def consume(self, numbers: Iterable[int]) -> None:
        """These are not handed out again."""
        self.ahead.update(number for number in numbers if number >= self.next_problem)
        while self.next_problem in self.ahead:
            self.ahead.remove(self.next_problem)
            self.next_problem += 1


PATIENCE_S = 300.0  # the fleet may be replacing a replica
FRUITLESS = 50  # groups without signal in a row, after which dynamic sampling gives up, in batches


@dataclass
class Run:
    """The state of the loop."""

    options: Options
    environment: Environment
    held_out: Environment
    policy: Policy  # of any version
    path: Path  # of the record
    queue: GroupQueue
    version: int  # the newest that the learner knows to be served
    say: Say = print
    step: int = 0
    positions: Positions = field(default_factory=Positions)
    filtered: list[Group] = field(default_factory=list)  # without signal, since the last step
    generated_tokens: int = 0
    in_flight: int = 0  # problems that the fleet answers
    doing: str = "waiting for answers"
    best: Evaluation | None = None
    sampling: asyncio.Event = field(default_factory=asyncio.Event)  # cleared once no step is left
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.sampling.set()

    def state(self) -> str:
        """What the run is doing, for a person."""
        wanted = self.options.groups_per_step
        filtered = f", {len(self.filtered)} without signal" if self.filtered else ""
        answers = self.in_flight * self.options.answers_per_group
        return (
            f"step {self.step + 1} of {self.options.steps}: {self.doing}; {self.in_flight} prompts in flight "
            f"({answers} answers), {len(self.queue)} of {wanted} groups ready{filtered}, "
            f"version {self.version}, {time.monotonic() - self.started:.0f} s"
        )

    def training(self) -> Training:
        """The trainer behind the fleet's address."""
        return Training(self.policy.client, patience_s=PATIENCE_S, say=self.say)


async def produce(run: Run) -> None:
    """Sample, score and put, in a loop; ends only by cancellation or an error.

    Raises:
        FleetError: the fleet refuses, or its answers lack something that a trainer needs.
        ValueError: a reward is no number; or dynamic sampling finds no group with signal.
    """
    while True:
        await run.sampling.wait()
        number = run.positions.hand_out()
        run.in_flight += 1
        try:
            attempts = await run.environment.attempts(number, run.options.answers_per_group, run.policy)
        except Unanswered as error:
            run.say(f"problem {number} is left out: {error}")
            run.positions.consume([number])
            continue
        finally:
            run.in_flight -= 1
        group = Group(number=number, attempts=[shaped(attempt, run.options) for attempt in attempts])
        run.generated_tokens += group.tokens
        if run.options.dynamic_sampling and not group.has_signal:
            leave_out(run, group)
            continue
        await run.queue.put(group)


def shaped(attempt: Attempt, options: Options) -> Attempt:
    """The attempt with its penalty for length."""
    if options.overlong_buffer == 0:
        return attempt
    penalty = overlong_penalty(
        min(attempt.sampled_tokens, options.longest),
        max_tokens=options.longest,
        buffer_tokens=options.overlong_buffer,
    )
    return replace(attempt, penalty=penalty)


def leave_out(run: Run, group: Group) -> None:
    """A group without signal: it counts as consumed, and in the mean reward.

    Raises:
        ValueError: there are only such groups.
    """
    run.filtered.append(group)
    run.positions.consume([group.number])
    limit = FRUITLESS * run.options.groups_per_step
    if len(run.filtered) >= limit:
        raise ValueError(
            f"--dynamic-sampling left out {limit} groups for one step: all attempts at a problem get "
            "the same reward; expected a task that the model solves at times"
        )
