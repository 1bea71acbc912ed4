"""The state of a run, and its producers."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.client.run_display import Output, RunStatus
from app.jobs.environments.environment import Environment
from app.jobs.evaluation import Evaluation
from app.jobs.groups import Group, GroupQueue, Rollout
from app.jobs.metrics import Row, StepRecord
from app.jobs.options import JobOptions
from app.jobs.policy import Policy, Unanswered
from trainers.advantages import overlong_penalty

LEFT_OUT = 50  # batches of unanswered problems, at most
FRUITLESS = 50  # batches of groups without signal, at most


@dataclass
class Positions:
    """Problem numbers: handed out in order, consumed in any order.

    A problem is consumed when it was learned from or dropped. The next job gets the others again.

    Args:
        next_problem: all problems before it are consumed.
        ahead: consumed problems after it.
    """

    next_problem: int = 0
    ahead: set[int] = field(default_factory=set)
    _handed_out: int = -1

    def __post_init__(self) -> None:
        self._handed_out = self.next_problem - 1

    def hand_out(self) -> int:
        """The next problem, neither consumed nor in flight."""
        self._handed_out += 1
        while self._handed_out in self.ahead:
            self._handed_out += 1
        return self._handed_out

    def consume(self, numbers: Iterable[int]) -> None:
        self.ahead.update(number for number in numbers if number >= self.next_problem)
        while self.next_problem in self.ahead:
            self.ahead.remove(self.next_problem)
            self.next_problem += 1


@dataclass
class Run:
    options: JobOptions
    environment: Environment
    held_out: Environment
    policy: Policy
    path: Path  # the record
    version: int  # the newest known to be served
    output: Output
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    trained: int = 0  # the newest published step
    unrecorded: StepRecord | None = None  # a step that a killed job has published
    positions: Positions = field(default_factory=Positions)
    filtered: list[Group] = field(default_factory=list)  # without signal, since the last step
    rows: Sequence[Row] = ()  # rollouts of the last step
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=10))  # steps of this process
    left_out: int = 0  # problems in a row
    unanswered: int = 0  # problems since the last step
    generated_tokens: int = 0
    in_flight: int = 0  # problems
    doing: str = "waiting for answers"
    best: Evaluation | None = None
    queue: GroupQueue = field(init=False)
    step_settings: str | None = field(init=False)  # JSON; None: the trainer's
    sampling: asyncio.Event = field(default_factory=asyncio.Event)  # cleared after the last batch

    def __post_init__(self) -> None:
        self.queue = GroupQueue(self.options.groups_per_step, self.options.max_staleness)
        settings = self.options.step_settings().model_dump_json(exclude_unset=True, exclude_none=True)
        self.step_settings = None if settings == "{}" else settings
        self.sampling.set()

    def say(self, line: str) -> None:
        self.output.line(line)

    def left_s(self) -> float | None:
        """Time to the last step at the recent pace; None before the first."""
        if not self.recent:
            return None
        pace_s = sum(record.step_s for record in self.recent) / len(self.recent)
        return max(0, self.options.steps - self.recent[-1].step) * pace_s

    def status(self) -> RunStatus:
        rollouts = self.in_flight * self.options.answers_per_group
        detail = [
            f"{len(self.queue)} of {self.options.groups_per_step} groups ready",
            f"{self.in_flight} prompts in flight ({rollouts} rollouts)",
            *([f"{len(self.filtered)} left out with equal rewards"] if self.filtered else []),
            *([f"{len(self.queue.dropped)} left out as too stale"] if self.queue.dropped else []),
            *([f"{self.unanswered} left out without an answer"] if self.unanswered else []),
        ]
        return RunStatus(
            step=min(self.step + 1, self.options.steps),
            steps=self.options.steps,
            doing=self.doing,
            detail=", ".join(detail),
            version=self.version,
            elapsed_s=time.monotonic() - self.started,
            reward=self.recent[-1].reward if self.recent else None,
            left_s=self.left_s(),
        )


async def produce(run: Run) -> None:
    """Sample, score and queue, until cancelled."""
    while True:
        await run.sampling.wait()
        number = run.positions.hand_out()
        run.in_flight += 1
        try:
            rollouts = await run.environment.rollouts(number, run.options.answers_per_group, run.policy)
        except Unanswered as error:
            run.say(f"problem {number} is left out: {error}")
            run.positions.consume([number])
            run.left_out += 1
            run.unanswered += 1
            if run.left_out >= LEFT_OUT * run.options.groups_per_step:
                raise ValueError(f"{run.left_out} problems in a row were not answered: {error}") from error
            continue
        finally:
            run.in_flight -= 1
        run.left_out = 0
        group = Group(number=number, rollouts=[penalised(each, run.options) for each in rollouts])
        run.generated_tokens += group.tokens
        if run.options.dynamic_sampling and not group.has_signal:
            leave_out(run, group)
            continue
        await run.queue.put(group)


def penalised(rollout: Rollout, options: JobOptions) -> Rollout:
    if options.overlong_buffer == 0:
        return rollout
    longest = options.longest
    penalty = overlong_penalty(
        min(rollout.tokens, longest), max_tokens=longest, buffer_tokens=options.overlong_buffer
    )
    return replace(rollout, penalty=penalty)


def leave_out(run: Run, group: Group) -> None:
    """Consume a group without signal; it counts in the mean reward."""
    run.filtered.append(group)
    run.positions.consume([group.number])
    limit = FRUITLESS * run.options.groups_per_step
    if len(run.filtered) >= limit:
        raise ValueError(
            f"--dynamic-sampling left out {limit} groups for one step: all attempts at a problem get "
            "the same reward; expected a task that the model solves at times"
        )
