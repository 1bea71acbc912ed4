"""vLLM's RL operations on every serving replica: `/pause`, `/sleep` and their like, with fleet meaning.

What they leave behind (paused, asleep) is the fleet's *condition*: the operations that lead to it from a
fresh engine, in order. It is durable before a replica hears of the operation, and a replica that starts
later goes through it before it takes requests. None is admitted while an operation is on its way that may
change the condition.

A sleep at level 2 throws the weights away; while the condition has one, they are *void*, and no KV cache is
woken, without which nothing is computed. A committed round brings them back:

    sleep(level=2) ─► wake_up(tags=weights) ─► a round ─► wake_up(tags=kv_cache)
                      void                     whole: what put them to sleep counts as level 1 from here on,
                                               so that a joiner comes to the same with its weights intact
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deployments.errors import Conflict, InvalidRequest, ReplicaUnavailable
from deployments.ledger.decisions import Conditioned, Step
from deployments.ledger.fleet import Fleet
from deployments.ledger.members import Member, Task
from deployments.ledger.verdict import judge, sentence
from deployments.protocol import FleetOperation, InstructionKind

Condition = tuple[Step, ...]
PAUSE, RESUME = FleetOperation.PAUSE, FleetOperation.RESUME
SLEEP, WAKE_UP = FleetOperation.SLEEP, FleetOperation.WAKE_UP
CHANGING = (PAUSE, RESUME, SLEEP, WAKE_UP)
SLEEPING_PARTS = frozenset({"weights", "kv_cache"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a task of this module asked for, of the fleet or of one joiner."""

    step: Step
    of_joiner: bool


class Operations:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._calls: dict[int, Call] = {}  # by the task's id, in order
        self.condition: Condition = ()
        self._written: Condition = ()  # what a successor would recover

    def call(self, operation: FleetOperation, arguments: Mapping[str, Any], now: float) -> Task:
        """The task's result is {replica id: value}; its error names the replicas that could not."""
        step = Step(operation=operation, arguments=dict(arguments))
        if operation is WAKE_UP:
            self._check_whole(step)
        task = self._ask(self._fleet.serving(), Call(step=step, of_joiner=False), now)
        # A replica may do it and this process end before it hears so: weights that may be void count as void.
        self._write()
        return task

    def recover(self, condition: Condition) -> None:
        self.condition = self._written = condition

    def weights_came(self) -> None:
        """A round is finished: whoever holds its version holds whole weights."""
        self.condition, self._written = whole(self.condition), whole(self._written)

    def check_awake(self) -> None:
        """Raises Conflict while the weights sleep: there is no memory that an update could go to."""
        if "weights" in asleep(self.condition) | asleep(self._meant()):
            raise Conflict(
                "the fleet's weights sleep: wake them before an update (POST /wake_up?tags=weights)",
                {"condition": [step.operation.value for step in self.condition]},
            )

    def _check_whole(self, step: Step) -> None:
        """Raises Conflict if waking up would let the fleet compute with weights that are void."""
        tags = step.arguments.get("tags")
        if void(self._meant()) and (not tags or "kv_cache" in tags):
            raise Conflict(
                "the fleet's weights were thrown away by a sleep at level 2, and no round was committed "
                "since: wake their memory (POST /wake_up?tags=weights), update them (publish, or POST "
                "/fleet/rollback), then wake the rest (POST /wake_up?tags=kv_cache)",
                {"tags": tags, "condition": [step.operation.value for step in self.condition]},
            )

    def bring(self, member: Member, now: float, *, in_round: bool) -> bool:
        """Whether a joiner is in the fleet's condition; if not, it is on its way there.

        Args:
            in_round: it takes part in a round that is not decided. What it has staged would not
                outlast a sleep: it waits for the round's end.
        """
        if any(not call.of_joiner and call.step.operation in CHANGING for call in self._calls.values()):
            return False
        steps = way(member.condition, self.condition)
        if member.has_order(InstructionKind.CALL) or (in_round and any(s.operation is SLEEP for s in steps)):
            return False
        for step in steps:
            self._ask([member], Call(step=step, of_joiner=True), now)
        return member.condition == self.condition

    def _meant(self) -> Condition:
        """Where the fleet is once the calls on their way are through."""
        condition = self.condition
        for call in self._calls.values():
            condition = condition if call.of_joiner else after(condition, call.step)
        return condition

    def _write(self) -> None:
        meant = self._meant()
        if meant != self._written:
            self._written = meant
            self._fleet.decisions.append(Conditioned(steps=meant))

    def _ask(self, members: list[Member], call: Call, now: float) -> Task:
        args = {"operation": call.step.operation.value, "arguments": dict(call.step.arguments)}
        orders = {member.replica_id: args for member in members}
        task = self._fleet.ask(InstructionKind.CALL, orders, now, then=self._called)
        self._calls[id(task)] = call
        return task

    def _called(self, task: Task, now: float) -> None:
        call = self._calls.pop(id(task))
        verdict = judge(task)
        if call.of_joiner:
            self._fleet.fence_each(verdict.all_wrong, f"join: {call.step.operation}", now)
        else:
            self._fleet.fence_each(verdict.failed, "call", now)
        self._note(call, task, now)
        if verdict.rejected:
            wrong = dict(verdict.rejected)
            task.finish(error=InvalidRequest(f"rejected by {sentence(wrong)}", {"replicas": wrong}))
        elif verdict.failed or task.absent:
            missing = {**task.absent, **verdict.failed}
            task.finish(error=ReplicaUnavailable(f"not done by {sentence(missing)}", {"replicas": missing}))
        task.finish(result={replica_id: answer.value for replica_id, answer in task.answers.items()})

    def _note(self, call: Call, task: Task, now: float) -> None:
        """Keep what those who did it are in now, and what the fleet is meant to be in."""
        if call.step.operation not in CHANGING:
            return
        done = judge(task).done
        for replica_id in done:
            member = self._fleet.members.get(replica_id)
            if member is not None:
                member.condition = after(member.condition, call.step)
        nobody_there = not task.answers and not task.absent  # those who come later are meant
        wanted = after(self.condition, call.step)
        if not call.of_joiner and (done or nobody_there) and wanted != self.condition:
            self.condition = wanted
            self._fleet.events.record("condition", now, steps=[step.operation.value for step in wanted])
        self._write()


def after(condition: Condition, step: Step) -> Condition:
    """The shortest way from a fresh engine to where `step` leads from `condition`."""
    match step.operation:
        case FleetOperation.PAUSE:
            return (*_without(condition, PAUSE), step)
        case FleetOperation.RESUME:
            return _without(condition, PAUSE)
        case FleetOperation.SLEEP:
            if not _level(step) and asleep(condition):
                return condition  # memory that sleeps goes on sleeping
            if void(condition):  # and stays so, wherever it goes
                step = replace(step, arguments={**step.arguments, "level": 2})
            return (*_without(condition, SLEEP, WAKE_UP), step)
        case FleetOperation.WAKE_UP:
            longer = (*condition, step)
            # Who is wholly awake is also resumed, whoever has paused it.
            return longer if asleep(longer) else _without(longer, PAUSE, SLEEP, WAKE_UP)
    return condition


def way(have: Condition, wanted: Condition) -> Condition:
    """The operations that lead from one condition to another."""
    if wanted[: len(have)] == have:
        return wanted[len(have) :]
    back = [Step(operation=WAKE_UP, arguments={"tags": None})] if asleep(have) else []
    paused = any(step.operation is PAUSE for step in have)
    return (*back, *([Step(operation=RESUME, arguments={})] if paused else []), *wanted)


def asleep(condition: Condition) -> frozenset[str]:
    """The parts of an engine that sleep: "weights", "kv_cache", or at level 0 only the "scheduling"."""
    parts: frozenset[str] = frozenset()
    for step in condition:
        if step.operation is SLEEP:
            parts = SLEEPING_PARTS if _level(step) else frozenset({"scheduling"})
        elif step.operation is WAKE_UP:
            tags = step.arguments.get("tags")
            # At level 0 there is no memory to wake: whatever is asked for resumes.
            parts = frozenset() if tags is None or "scheduling" in parts else parts - frozenset(tags)
    return parts


def void(condition: Condition) -> bool:
    """Whether the weights were thrown away, and have not come back."""
    return any(map(_loses, condition))


def whole(condition: Condition) -> Condition:
    """The same with the weights that came: they sleep, if they do, and are not lost."""
    return tuple(
        replace(step, arguments={**step.arguments, "level": 1}) if _loses(step) else step
        for step in condition
    )


def _loses(step: Step) -> bool:
    return step.operation is SLEEP and _level(step) > 1


def _level(step: Step) -> int:
    return int(step.arguments.get("level", 1))


def _without(condition: Condition, *operations: FleetOperation) -> Condition:
    return tuple(step for step in condition if step.operation not in operations)
