"""vLLM's RL operations on every serving replica: `/pause`, `/sleep` and the others, with fleet meaning.

Pause and sleep set the fleet's engine state, durable before a replica learns of it. Joiners reach it before
admission. With `mode=wait` the replicas drain first; at the timeout nothing changes. While weights are
discarded (sleep at level 2) no KV cache is woken; a committed round replaces them.
"""

from dataclasses import replace
from typing import get_args

from deployments.ledger import membership
from deployments.ledger.decisions import EngineStateChanged
from deployments.ledger.state import (
    Member,
    PendingCall,
    PendingDrain,
    PendingOperation,
    State,
    classify,
    join_reasons,
)
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
    path_to,
)
from deployments.protocol.errors import Conflict, InvalidRequest, ReplicaUnavailable
from deployments.protocol.poll import RunOperation

LASTING = get_args(LastingOperation)


def names(state: State) -> tuple[str, ...]:
    return tuple(operation.name for operation in state.engine_state)


def call_fleet(state: State, operation: Operation) -> PendingCall:
    """The call's result is {replica id: answer}. Raises Conflict if the fleet would compute with discarded
    weights."""
    if isinstance(operation, WakeUp):
        _check_intact(state, operation)
    waits = isinstance(operation, Pause | Sleep) and operation.mode is InFlight.WAIT
    if isinstance(operation, LASTING) and not waits:
        _supersede(state, operation)
    call = PendingCall(name=RunOperation.name, waiting=set(state.serving()), on_complete=_called)
    state.pending.append(call)
    state.operations[call] = pending = PendingOperation(operation=operation)
    if waits:
        _drain(state, call, pending)
    else:
        _order(state, call, pending)
    return call


def _order(state: State, call: PendingCall, pending: PendingOperation) -> None:
    pending.draining = False
    for member in state.serving():
        if member in call.waiting:
            membership.queue(state, member, RunOperation(operation=pending.operation), call)
    # Before any replica runs it: weights that may be discarded count as discarded.
    _make_durable(state)


def _drain(state: State, call: PendingCall, pending: PendingOperation) -> None:
    name, timeout_s = f"{pending.operation.name} with mode=wait", state.config.drain_timeout_s

    def ended(drain: PendingDrain) -> None:
        if not drain.late:
            _order(state, call, pending)
            return
        reason = (
            f"{name}: requests still ran after drain_timeout_s = {timeout_s:g} s "
            f"({membership.still_running(drain.late)}); the fleet goes on as before. Repeat it, raise "
            "'weights.drain_timeout_s', or use mode=abort or mode=keep"
        )
        _undo(state, call, Conflict(reason, {"running": dict(drain.late), "timeout_s": timeout_s}))

    pending.draining, pending.drain_id = True, f"call {state.next_seq}"
    state.next_seq += 1
    membership.begin_drain(
        state,
        pending.drain_id,
        call.waiting,
        what=name,
        then="nothing changes",
        on_end=ended,
    )


def _supersede(state: State, operation: Operation) -> None:
    for call, pending in list(state.operations.items()):
        if pending.draining:
            reason = f"{pending.operation.name} with mode=wait gave way to a later {operation.name}"
            _undo(state, call, Conflict(f"{reason}; it has changed nothing", {"by": operation.name}))


def _undo(state: State, call: PendingCall, error: Conflict) -> None:
    membership.forget_drain(state, state.operations.pop(call).drain_id)
    membership.forget(state, call)
    call.finish(error=error)


def check_awake(state: State) -> None:
    if SleepTag.WEIGHTS in asleep(state.engine_state) | asleep(_intended(state, drained=True)):
        raise Conflict(
            "the fleet's weights sleep: wake them first (POST /wake_up?tags=weights)",
            {"condition": list(names(state))},
        )


def converge(state: State, member: Member) -> bool:
    """Send operations that lead to the fleet's engine state. Returns whether the member is there."""
    if any(
        not pending.of_one and isinstance(pending.operation, LASTING) for pending in state.operations.values()
    ):
        return False
    if equivalent(member.engine_state, state.engine_state):
        member.engine_state = state.engine_state
        return True
    steps = path_to(state.engine_state, member.engine_state)
    # A sleep would discard what a round has staged: wait for the round's end.
    if member.has_queued(RunOperation) or (state.round and any(isinstance(step, Sleep) for step in steps)):
        return False
    for step in steps:
        if isinstance(step, Pause | Sleep) and step.mode is InFlight.WAIT:
            step = replace(step, mode=InFlight.KEEP)  # a joiner has no requests to wait for
        call = membership.send(
            state, RunOperation.name, {member: RunOperation(operation=step)}, on_complete=_called
        )
        state.operations[call] = PendingOperation(operation=step, of_one=True)
    return False


def _check_intact(state: State, wake_up: WakeUp) -> None:
    tags = wake_up.tags
    if discarded(_intended(state, drained=False)) and (not tags or SleepTag.KV_CACHE in tags):
        raise Conflict(
            "the fleet's weights were discarded by a sleep at level 2, and no round was committed "
            "since: wake their memory (POST /wake_up?tags=weights), update them (publish, or POST "
            "/fleet/rollback), then wake the rest (POST /wake_up?tags=kv_cache)",
            {"tags": None if tags is None else list(tags), "condition": list(names(state))},
        )


def _intended(state: State, *, drained: bool) -> EngineState:
    engine_state = state.engine_state
    for pending in state.operations.values():
        if not pending.of_one and (drained or not pending.draining):
            engine_state = _after(engine_state, pending.operation)
    return engine_state


def _make_durable(state: State) -> None:
    intended = _intended(state, drained=False)
    if intended != state.durable_engine_state:
        state.durable_engine_state = intended
        state.decide(EngineStateChanged(steps=intended))


def _called(state: State, call: PendingCall) -> None:
    pending = state.operations.pop(call)
    if pending.drain_id:
        membership.forget_drain(state, pending.drain_id)
    verdict = classify(call)
    if pending.of_one:
        membership.fence_each(state, verdict.not_done, f"condition: {pending.operation.name}")
    elif isinstance(pending.operation, LASTING):
        membership.fence_each(state, verdict.replica_failed, RunOperation.name)
    if isinstance(pending.operation, LASTING):
        _record(state, pending, call, verdict.done)
    if verdict.rejected:
        wrong = dict(verdict.rejected)
        call.finish(error=InvalidRequest(f"rejected by {join_reasons(wrong)}", {"replicas": wrong}))
    elif verdict.replica_failed or call.absent:
        missing = {**call.absent, **verdict.replica_failed}
        call.finish(error=ReplicaUnavailable(f"not done by {join_reasons(missing)}", {"replicas": missing}))
    call.finish(result={replica_id: answer.value for replica_id, answer in call.answers.items()})


def _record(state: State, pending: PendingOperation, call: PendingCall, done: frozenset[str]) -> None:
    for replica_id in done:
        if (member := state.members.get(replica_id)) is not None:
            member.engine_state = _after(member.engine_state, pending.operation)
    no_replica_served = not call.answers and not call.absent  # it applies to those that join later
    wanted = _after(state.engine_state, pending.operation)
    if not pending.of_one and (done or no_replica_served) and wanted != state.engine_state:
        state.engine_state = wanted
        state.record("condition", steps=list(names(state)))
    _make_durable(state)


def _after(engine_state: EngineState, operation: Operation) -> EngineState:
    return apply(engine_state, operation) if isinstance(operation, LASTING) else engine_state
