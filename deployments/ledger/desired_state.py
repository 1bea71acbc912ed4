"""vLLM's RL operations on every serving replica: `/pause`, `/sleep` and the others, with fleet meaning.

The lasting ones (pause, sleep) set the fleet's *condition*, see `deployments.condition`. It is durable
before a replica learns of the operation, and a replica that joins later reaches it before it takes requests.
No joiner is admitted while an operation is pending that may change the condition.

While weights are discarded (a sleep at level 2), no KV cache is woken, without which nothing is computed. A
committed round replaces them.
"""

from dataclasses import dataclass
from typing import get_args

from deployments.condition import Condition, apply, asleep, discarded, intact, path_to
from deployments.errors import Conflict, InvalidRequest, ReplicaUnavailable
from deployments.ledger.decisions import Conditioned, DecisionLog
from deployments.ledger.dispatch import Dispatch
from deployments.ledger.event_log import EventLog
from deployments.ledger.members import Member, PendingCall
from deployments.ledger.membership import Membership
from deployments.ledger.verdict import classify, join_reasons
from deployments.protocol.instructions import Call
from deployments.protocol.operations import LastingOperation, Operation, Sleep, SleepTag, WakeUp

LASTING = get_args(LastingOperation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a pending call carries out, on the fleet or on one joiner."""

    operation: Operation
    of_joiner: bool


class DesiredState:
    """The fleet's condition, and the operations that are pending."""

    def __init__(
        self, membership: Membership, dispatch: Dispatch, decisions: DecisionLog, events: EventLog
    ) -> None:
        self._membership = membership
        self._dispatch = dispatch
        self._decisions = decisions
        self._events = events
        self._asked: dict[int, _Asked] = {}  # by the pending call's identity, in order
        self._condition: Condition = ()
        self._durable: Condition = ()  # what a successor would recover

    @property
    def condition(self) -> Condition:
        return self._condition

    def names(self) -> tuple[str, ...]:
        """The operations of the condition, for `/fleet`."""
        return tuple(operation.name for operation in self._condition)

    def call(self, operation: Operation, now: float) -> PendingCall:
        """Carry an operation out on every serving replica.

        The call's result is {replica id: answer}; its error names the replicas that could not.

        Raises:
            Conflict: it would let the fleet compute with discarded weights.
        """
        if isinstance(operation, WakeUp):
            self._check_intact(operation)
        call = self._ask(self._membership.serving(), _Asked(operation=operation, of_joiner=False), now)
        # A replica may carry it out and this process end before it learns so: weights that may be discarded
        # count as discarded.
        self._make_durable()
        return call

    def recover(self, condition: Condition) -> None:
        self._condition = self._durable = condition

    def on_weights_replaced(self) -> None:
        """A round is finished: whoever holds its version holds intact weights."""
        self._condition, self._durable = intact(self._condition), intact(self._durable)

    def check_awake(self) -> None:
        """Raises Conflict while the weights sleep: there is no memory that an update could go to."""
        if SleepTag.WEIGHTS in asleep(self._condition) | asleep(self._intended()):
            raise Conflict(
                "the fleet's weights sleep: wake them before an update (POST /wake_up?tags=weights)",
                {"condition": list(self.names())},
            )

    def converge(self, member: Member, now: float, *, in_round: bool) -> bool:
        """Whether a joiner is in the fleet's condition; if not, it is sent the operations that lead there.

        Args:
            in_round: it takes part in a round that is not decided. What it has staged would not
                survive a sleep: it waits for the round's end.
        """
        asked = self._asked.values()
        if any(not each.of_joiner and isinstance(each.operation, LASTING) for each in asked):
            return False
        steps = path_to(self._condition, member.condition)
        if member.has_queued(Call) or (in_round and any(isinstance(step, Sleep) for step in steps)):
            return False
        for step in steps:
            self._ask([member], _Asked(operation=step, of_joiner=True), now)
        return member.condition == self._condition

    def _check_intact(self, wake_up: WakeUp) -> None:
        """Raises Conflict if waking up would let the fleet compute with discarded weights."""
        tags = wake_up.tags
        if discarded(self._intended()) and (not tags or SleepTag.KV_CACHE in tags):
            raise Conflict(
                "the fleet's weights were discarded by a sleep at level 2, and no round was committed "
                "since: wake their memory (POST /wake_up?tags=weights), update them (publish, or POST "
                "/fleet/rollback), then wake the rest (POST /wake_up?tags=kv_cache)",
                {"tags": None if tags is None else list(tags), "condition": list(self.names())},
            )

    def _intended(self) -> Condition:
        """The fleet's condition once all pending calls are done."""
        condition = self._condition
        for asked in self._asked.values():
            condition = condition if asked.of_joiner else _after(condition, asked.operation)
        return condition

    def _make_durable(self) -> None:
        intended = self._intended()
        if intended != self._durable:
            self._durable = intended
            self._decisions.append(Conditioned.of(intended))

    def _ask(self, members: list[Member], asked: _Asked, now: float) -> PendingCall:
        bodies = {member: Call(operation=asked.operation) for member in members}
        call = self._dispatch.send_each(Call.name, bodies, now, on_complete=self._called)
        self._asked[id(call)] = asked
        return call

    def _called(self, call: PendingCall, now: float) -> None:
        asked = self._asked.pop(id(call))
        verdict = classify(call)
        if asked.of_joiner:
            self._membership.fence_each(verdict.not_done, f"join: {asked.operation.name}", now)
        else:
            self._membership.fence_each(verdict.replica_failed, Call.name, now)
        self._record(asked, call, now)
        if verdict.rejected:
            wrong = dict(verdict.rejected)
            call.finish(error=InvalidRequest(f"rejected by {join_reasons(wrong)}", {"replicas": wrong}))
        elif verdict.replica_failed or call.absent:
            missing = {**call.absent, **verdict.replica_failed}
            reason = f"not done by {join_reasons(missing)}"
            call.finish(error=ReplicaUnavailable(reason, {"replicas": missing}))
        call.finish(result={replica_id: answer.value for replica_id, answer in call.answers.items()})

    def _record(self, asked: _Asked, call: PendingCall, now: float) -> None:
        """The condition of those that carried a lasting operation out, and of the fleet."""
        if not isinstance(asked.operation, LASTING):
            return
        done = classify(call).done
        for replica_id in done:
            member = self._membership.get(replica_id)
            if member is not None:
                member.condition = _after(member.condition, asked.operation)
        nobody_served = not call.answers and not call.absent  # it applies to those that join later
        wanted = _after(self._condition, asked.operation)
        if not asked.of_joiner and (done or nobody_served) and wanted != self._condition:
            self._condition = wanted
            self._events.record("condition", now, steps=list(self.names()))
        self._make_durable()


def _after(condition: Condition, operation: Operation) -> Condition:
    return apply(condition, operation) if isinstance(operation, LASTING) else condition
