"""The state of a run, and its producers."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.client import calls
from app.client.connection import FleetError
from app.jobs.environments.environment import Environment
from app.jobs.evaluation import Evaluation
from app.jobs.groups import Group, Rollout, penalised
from app.jobs.metrics import Row, StepRecord
from app.jobs.options import JobOptions
from app.jobs.policy import Policy, Unanswered
from app.jobs.run_display import Display, RunStatus
from app.jobs.teacher import Teacher

LEFT_OUT = 50  # batches
SETTLED_AT_ONCE = 1 << 20  # characters
FRUITLESS = 50  # batches


@dataclass
class Run:
    """State beside the fleet's ledger (groups) and the record (steps)."""

    options: JobOptions
    environment: Environment
    held_out: Environment
    policy: Policy
    path: Path
    name: str  # the ledger's; survives a restart
    version: int
    output: Display
    started: float = field(default_factory=time.monotonic)
    teacher: Teacher | None = None
    step: int = 0
    trained: int = 0
    refused: bool = False  # the last batch, by the trainer
    next_problem: int = 0
    begun: deque[int] = field(default_factory=deque)  # known to the ledger, without a producer
    inherited: frozenset[int] = frozenset()  # begun by a killed job
    ready: int = 0
    waits: bool = True  # the newest step waits for groups, or has waited
    filtered: list[Group] = field(default_factory=list)
    stale: int = 0
    rows: Sequence[Row] = ()
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=10))
    left_out: int = 0  # consecutive
    unanswered: int = 0
    generated_tokens: int = 0
    in_flight: int = 0
    doing: str = "waiting for answers"
    best: Evaluation | None = None
    step_settings: str | None = field(init=False)  # JSON; None: the trainer's
    sampling: bool = True
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)  # `has_room`
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    settling: asyncio.Lock = field(default_factory=asyncio.Lock)
    unsettled: deque[dict[str, Any]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        settings = self.options.step_settings().model_dump_json(exclude_unset=True, exclude_none=True)
        self.step_settings = None if settings == "{}" else settings

    def say(self, line: str) -> None:
        self.output.line(line)

    async def count_ready(self, groups: int, *, waits: bool) -> None:
        async with self.changed:
            self.ready, self.waits = groups, waits
            self.changed.notify_all()

    @property
    def has_room(self) -> bool:
        """Whether to begin a group. Where steps wait for the trainer, more than the next step takes would
        only be staler."""
        begun = self.ready if self.waits else self.ready + self.in_flight
        return self.sampling and begun < self.options.groups_per_step

    async def begin_problem(self) -> int:
        """Waits for room. Problems that a killed job had begun are reopened: no number is skipped."""
        async with self.beginning:
            if not self.begun:  # while the trainer learns
                count = self.options.groups_in_flight
                await self.policy.client.send(calls.begin_groups(self.name, self.next_problem, count))
                self.begun.extend(range(self.next_problem, self.next_problem + count))
                self.next_problem += count
            async with self.changed:
                await self.changed.wait_for(lambda: self.has_room)
            return self.begun.popleft()

    async def settle(self, number: int, rollouts: Sequence[Rollout], reason: str = "discarded") -> None:
        """Close a problem's group; without rollouts it is left out. Groups that come during a call share the
        next one."""
        settled = [rollout.settled() for rollout in rollouts]
        group: dict[str, Any] = {"group": f"{self.name}.{number}", "rollouts": settled, "reason": reason}
        if number in self.inherited:  # others' must not be refused with it
            await self.policy.client.send(calls.settle_groups([group]))
            return
        self.unsettled.append(group)
        async with self.settling:
            while group in self.unsettled:
                groups, size = [], 0
                while self.unsettled and size < SETTLED_AT_ONCE:
                    groups.append(self.unsettled.popleft())
                    size += sum(len(each["info"]) for each in groups[-1]["rollouts"])
                await self.policy.client.send(calls.settle_groups(groups))

    def left_s(self) -> float | None:
        if not self.recent:
            return None
        pace_s = sum(record.step_s for record in self.recent) / len(self.recent)
        return max(0, self.options.steps - self.recent[-1].step) * pace_s

    def status(self) -> RunStatus:
        rollouts = self.in_flight * self.options.answers_per_group
        detail = [
            f"{self.ready} of {self.options.groups_per_step} groups ready",
            f"{self.in_flight} prompts in flight ({rollouts} rollouts)",
            *([f"{len(self.filtered)} left out with equal rewards"] if self.filtered else []),
            *([f"{self.stale} left out as too stale"] if self.stale else []),
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
    while True:
        number = await run.begin_problem()
        run.in_flight += 1
        is_ready = False
        try:
            is_ready = await play(run, number)
        except FleetError as error:
            if error.type != "conflict" or number not in run.inherited:
                raise
            # A router that waited for a new controller has sent it, unaware of the kill.
            run.say(f"problem {number} is not played again: the job before has settled it ({error.message})")
        async with run.changed:
            run.in_flight -= 1
            run.ready += is_ready
            run.changed.notify_all()


async def play(run: Run, number: int) -> bool:
    """Returns whether a step can learn from the group."""
    policy = replace(run.policy, group=f"{run.name}.{number}")
    try:
        made = await run.environment.rollouts(number, run.options.answers_per_group, policy)
    except Unanswered as error:
        run.say(f"problem {number} is left out: {error}")
        await run.settle(number, (), "unanswered")
        run.left_out += 1
        run.unanswered += 1
        if run.left_out >= LEFT_OUT * run.options.groups_per_step:
            raise ValueError(f"{run.left_out} problems in a row were not answered: {error}") from error
        return False
    run.left_out = 0
    group = Group(number=number, rollouts=[penalised(each, run.options) for each in made])
    run.generated_tokens += sum(rollout.tokens for rollout in made)
    if run.options.dynamic_sampling and not group.has_signal:
        await leave_out(run, group)
        return False
    await run.settle(number, made)
    return True


async def leave_out(run: Run, group: Group) -> None:
    """It counts in the mean reward."""
    await run.settle(group.number, (), "equal rewards")
    run.filtered.append(group)
    limit = FRUITLESS * run.options.groups_per_step
    if len(run.filtered) >= limit:
        raise ValueError(
            f"--dynamic-sampling left out {limit} groups for one step: all attempts at a problem get "
            "the same reward; expected a task that the model solves at times"
        )
