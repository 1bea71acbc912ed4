"""vLLM's RL operations on every serving replica: `/pause`, `/sleep` and the others, with fleet meaning.

The lasting ones (pause, sleep) set the fleet's engine state (`deployments.protocol.engine_state`). It is
durable before a replica learns of the operation. A replica that joins later, or that reports another state
because the controller restarted in the middle of an operation, is brought to it before it takes requests.
No joiner is admitted while an operation is pending that may change the condition.

With `mode=wait` the replicas are drained first, and nothing changes while requests run. If they still do
when time is over, or if another operation is asked for that does not wait, the fleet goes on as before, and
the caller is told so.

While weights are discarded (a sleep at level 2), no KV cache is woken, without which nothing is computed. A
committed round replaces them.
"""

from dataclasses import dataclass, replace
from typing import get_args

from deployments.ledger.decisions import Conditioned, DecisionLog, EventLog
from deployments.ledger.dispatch import Dispatch, Drains, PendingDrain, still_running
from deployments.ledger.members import Member, PendingCall, classify, join_reasons
from deployments.ledger.membership import Membership
from deployments.protocol.engine_state import (
    EngineState,
    InFlight,
    LastingOperation,
    Operation,
    Pause,
    Sleep,
    SleepTag,
    WakeUp,
    apply,
    asleep,
    discarded,
    equivalent,
    intact,
    path_to,
)
from deployments.protocol.errors import Conflict, InvalidRequest, ReplicaUnavailable
from deployments.protocol.poll import Call

LASTING = get_args(LastingOperation)


@dataclass(slots=True, kw_only=True, eq=False)
class _Asked:
    """What a pending call carries out, on the fleet or on one member that is to reach its condition."""

    operation: Operation
    of_one: bool
    drain_id: str = ""  # of a call with `mode=wait`
    drains: bool = False  # it waits for running requests: no replica was asked yet


class DesiredState:
    """The fleet's condition, and the operations that are pending."""

    def __init__(
        self,
        membership: Membership,
        dispatch: Dispatch,
        decisions: DecisionLog,
        events: EventLog,
        drains: Drains,
    ) -> None:
        self._drains = drains
        self._membership = membership
        self._dispatch = dispatch
        self._decisions = decisions
        self._events = events
        self._asked: dict[PendingCall, _Asked] = {}  # in order
        self._condition: EngineState = ()
        self._durable: EngineState = ()  # what a successor would recover

    @property
    def condition(self) -> EngineState:
        return self._condition

    def names(self) -> tuple[str, ...]:
        """The operations of the condition, for `/fleet`."""
        return tuple(operation.name for operation in self._condition)

    def call(self, operation: Operation, now: float) -> PendingCall:
        """Carry an operation out on every serving replica, with `mode=wait` once no request runs.

        The call's result is {replica id: answer}; its error names the replicas that could not, or on which
        requests still ran when time was over (Conflict: nothing has changed then).

        Raises:
            Conflict: it would let the fleet compute with discarded weights.
        """
        if isinstance(operation, WakeUp):
            self._check_intact(operation)
        waits = isinstance(operation, Pause | Sleep) and operation.mode is InFlight.WAIT
        if isinstance(operation, LASTING) and not waits:
            self._supersede(operation)
        call = self._dispatch.expect(Call.name, self._membership.serving(), on_complete=self._called)
        self._asked[call] = asked = _Asked(operation=operation, of_one=False)
        if waits:
            self._drain(call, asked, now)
        else:
            self._order(call, asked, now)
        return call

    def _order(self, call: PendingCall, asked: _Asked, now: float) -> None:
        """Ask those that the call waits for."""
        asked.drains = False
        for member in self._membership.serving():
            if member in call.waiting:
                self._dispatch.queue(member, Call(operation=asked.operation), now, call)
        # A replica may carry it out and this process end before it learns so: weights that may be discarded
        # count as discarded.
        self._make_durable()

    def _drain(self, call: PendingCall, asked: _Asked, now: float) -> None:
        asked.drains, asked.drain_id = True, self._dispatch.new_id("call")

        def ended(drain: PendingDrain, now: float) -> None:
            if call not in self._asked:
                return  # nobody is left to ask
            if not drain.late:
                self._order(call, asked, now)
                return
            reason = (
                f"{asked.operation.name} with mode=wait: requests still ran after drain_timeout_s = "
                f"{timeout_s:g} s ({still_running(drain.late)}); the fleet goes on as before. Repeat it, "
                "raise 'weights.drain_timeout_s', or use mode=abort or mode=keep"
            )
            self._undo(call, Conflict(reason, {"running": dict(drain.late), "timeout_s": timeout_s}))

        timeout_s = self._membership.config.drain_timeout_s
        name = f"{asked.operation.name} with mode=wait"
        self._drains.begin(
            asked.drain_id,
            call.waiting,
            now,
            what=name,
            timeout_s=timeout_s,
            then="nothing changes",
            on_end=ended,
        )

    def _supersede(self, operation: Operation) -> None:
        """What still waits for running requests gives way to an operation that does not wait."""
        for call, asked in list(self._asked.items()):
            if asked.drains:
                reason = f"{asked.operation.name} with mode=wait gave way to a later {operation.name}"
                self._undo(call, Conflict(f"{reason}; it has changed nothing", {"by": operation.name}))

    def _undo(self, call: PendingCall, error: Conflict) -> None:
        """A call whose replicas are not drained in time changes nothing."""
        self._drains.forget(self._asked.pop(call).drain_id)
        self._dispatch.forget(call)
        call.finish(error=error)

    def recover(self, condition: EngineState) -> None:
        self._condition = self._durable = condition

    def on_weights_replaced(self) -> None:
        """A round is finished: whoever holds its version holds intact weights."""
        self._condition, self._durable = intact(self._condition), intact(self._durable)

    def check_awake(self) -> None:
        """Raises Conflict while the weights sleep, when there is no memory that an update could go to."""
        if SleepTag.WEIGHTS in asleep(self._condition) | asleep(self._intended(drained=True)):
            raise Conflict(
                "the fleet's weights sleep: wake them first (POST /wake_up?tags=weights)",
                {"condition": list(self.names())},
            )

    def on_report(self, member: Member, reported: EngineState) -> None:
        """What a member says of itself counts, unless it has something to do that changes it."""
        if not member.has_queued(Call) and not equivalent(member.condition, reported):
            member.condition = reported

    def converge(self, member: Member, now: float, *, in_round: bool) -> bool:
        """Whether a member is in the fleet's condition; if not, it is sent the operations that lead there.

        Args:
            in_round: it takes part in a round that is not decided. What it has staged would not
                survive a sleep: it waits for the round's end.
        """
        asked = self._asked.values()
        if any(not each.of_one and isinstance(each.operation, LASTING) for each in asked):
            return False
        if equivalent(member.condition, self._condition):
            member.condition = self._condition
            return True
        steps = path_to(self._condition, member.condition)
        if member.has_queued(Call) or (in_round and any(isinstance(step, Sleep) for step in steps)):
            return False
        for step in steps:
            bodies = {member: Call(operation=_at_once(step))}
            call = self._dispatch.send_each(Call.name, bodies, now, on_complete=self._called)
            self._asked[call] = _Asked(operation=step, of_one=True)
        return False

    def _check_intact(self, wake_up: WakeUp) -> None:
        """Raises Conflict if waking up would let the fleet compute with discarded weights."""
        tags = wake_up.tags
        if discarded(self._intended(drained=False)) and (not tags or SleepTag.KV_CACHE in tags):
            raise Conflict(
                "the fleet's weights were discarded by a sleep at level 2, and no round was committed "
                "since: wake their memory (POST /wake_up?tags=weights), update them (publish, or POST "
                "/fleet/rollback), then wake the rest (POST /wake_up?tags=kv_cache)",
                {"tags": None if tags is None else list(tags), "condition": list(self.names())},
            )

    def _intended(self, *, drained: bool) -> EngineState:
        """The fleet's condition once all pending calls are done; `drained`: also those that drain first."""
        condition = self._condition
        for asked in self._asked.values():
            if not asked.of_one and (drained or not asked.drains):
                condition = _after(condition, asked.operation)
        return condition

    def _make_durable(self) -> None:
        intended = self._intended(drained=False)
        if intended != self._durable:
            self._durable = intended
            self._decisions.append(Conditioned.of(intended))

    def _called(self, call: PendingCall, now: float) -> None:
        asked = self._asked.pop(call)
        if asked.drain_id:
            self._drains.forget(asked.drain_id)
        verdict = classify(call)
        if asked.of_one:
            self._membership.fence_each(verdict.not_done, f"condition: {asked.operation.name}", now)
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
        if not asked.of_one and (done or nobody_served) and wanted != self._condition:
            self._condition = wanted
            self._events.record("condition", now, steps=list(self.names()))
        self._make_durable()


def _at_once(operation: LastingOperation) -> LastingOperation:
    """The same for a joiner: nobody waits for what a former member may still compute."""
    if isinstance(operation, Pause | Sleep) and operation.mode is InFlight.WAIT:
        return replace(operation, mode=InFlight.KEEP)
    return operation


def _after(condition: EngineState, operation: Operation) -> EngineState:
    return apply(condition, operation) if isinstance(operation, LASTING) else condition
