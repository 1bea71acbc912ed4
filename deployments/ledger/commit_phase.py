"""A round from its decision to its end: it only rolls forward. Failing replicas are fenced.

    together: COMMIT(hold) to all ─► all swapped, or certain not to serve ─► RELEASE to all ─► finished
    rolling:  (DRAIN) COMMIT to `max_unavailable` at a time ─────────────────────────────────► finished

A restarted controller resumes here, and waits for each participant to register again.
"""

from dataclasses import replace
from functools import partial

from deployments.ledger import membership
from deployments.ledger.decisions import KEPT_ROUNDS, Committed, Ended
from deployments.ledger.state import (
    Member,
    MemberState,
    PendingCall,
    PendingDrain,
    Round,
    RoundPart,
    RoundPhase,
    State,
    classify,
)
from deployments.protocol import poll
from deployments.protocol.engine_state import InFlight, intact
from deployments.protocol.errors import Conflict, RoundAborted, SlipstreamError, TransferAborted
from deployments.protocol.publishing import ReplicaTimings, RoundReport

CONTROLLER_RESTARTED = "the controller restarted"
RELEASE_S = 5.0
KEPT_TIMINGS = 2000  # replicas' timings over all rounds: 200 rounds of 1,000 replicas would be 20 MB of JSON


def decide(state: State, current: Round) -> None:
    """The point of no return: durable before any replica learns of it."""
    current.left_behind |= {each.replica_id: each.reason for each in current.participants if each.out}
    current.participants = tuple(current.remaining())
    current.committed_at = state.now
    state.decide(
        Committed(
            round_id=current.round_id,
            version=current.version,
            label=current.label,
            participants=tuple(member.participant for member in current.participants),
            commit=current.commit,
            kv_cache=current.kv_cache,
            in_flight=current.in_flight,
            persist=current.persist,
            checks=current.checks,
            digest=current.digest,
            drafter=current.drafter,
        )
    )
    _begin(state, current)


def resume(state: State, decision: Committed) -> None:
    members = [
        membership.recover_member(state, each, version=decision.version - 1, was_serving=False)
        for each in decision.participants
    ]
    current = Round(
        round_id=decision.round_id,
        version=decision.version,
        label=decision.label,
        epoch=state.epoch,
        opened_at=state.now,
        part_since=state.now,
        committed_at=state.now,
        participants=tuple(member for member in members if member is not None),
        connection=None,
        commit=decision.commit,
        kv_cache=decision.kv_cache,
        in_flight=decision.in_flight,
        persist=decision.persist,
        checks=decision.checks,
        digest=decision.digest,
        drafter=decision.drafter,
        decided_for=len(decision.participants),
    )
    _begin(state, current)


def on_return(state: State, member: Member, report: poll.Report) -> None:
    """A member from before a restart: it has swapped, can swap, or starts over."""
    current = state.round
    member.world_size = report.world_size
    member.state = MemberState.SERVING if member.was_serving else MemberState.JOINING
    if current is None or member not in current.commits:
        if report.version != state.committed_version:
            member.state = MemberState.JOINING
        return
    call = current.commits[member]
    if report.version == current.version:
        call.stop_waiting_for(member)
    elif report.staged_round != current.round_id:
        reason = "lost its staging while the controller restarted"
        if current.hold:  # it still serves the old version: it must stop before others are released
            _fence_until_certain(state, current, member, reason)
        else:
            member.state = MemberState.JOINING
            current.left_behind[member.replica_id] = reason
            call.stop_waiting_for(member)


def _begin(state: State, current: Round) -> None:
    state.round, state.persist = current, current.persist
    state.committed_version, state.label = current.version, current.label
    state.drafter = current.drafter
    enter(state, current, RoundPhase.COMMITTING)
    for member in current.participants:
        _expect_commit(state, current, member)


def _expect_commit(state: State, current: Round, member: Member) -> None:
    together = current.commit is poll.CommitMode.TOGETHER  # nothing follows before the last has swapped
    if together:
        current.swapping.add(member)
    current.commits[member] = call = PendingCall(
        name=poll.Commit.name,
        waiting={member},
        on_complete=partial(_swapped, current=current, member=member),
        certain=True,
        batch=current.swapping if together else None,
    )
    state.pending.append(call)


def advance(state: State) -> bool:
    """Send COMMIT to as many as may be unavailable at once. Returns whether the round entered its
    next phase."""
    current = state.round
    if current is None or current.phase is not RoundPhase.COMMITTING:
        return False
    together = current.commit is poll.CommitMode.TOGETHER
    limit = len(current.participants) if together else state.config.max_unavailable
    busy = [member for member in current.ordered if not current.commits[member].done]
    ready = [
        member
        for member, call in current.commits.items()
        if member.alive and call.waiting and member not in current.ordered
    ]
    for member in ready[: max(0, limit - len(busy))]:
        current.ordered.add(member)
        if not together and current.must_drain:
            _drain(state, current, member)
        else:
            _send_commit(state, current, member)
    all_done = all(call.done for call in current.commits.values())
    if all_done:
        _release(state, current)
    return all_done


def _drain(state: State, current: Round, member: Member) -> None:
    """Requests that outlast the timeout continue."""

    def ended(drain: PendingDrain) -> None:
        current.not_drained |= drain.late
        if member in current.commits[member].waiting:
            _send_commit(state, current, member)

    membership.begin_drain(
        state,
        poll.drain_of_round(current.round_id),
        [member],
        what=f"round {current.round_id}",
        then="keep",
        on_end=ended,
    )


def _send_commit(state: State, current: Round, member: Member) -> None:
    keep = None
    if state.retains(current):
        keep = poll.WriteVersion(
            version=current.version,
            label=current.label,
            fleet_id=state.fleet_id,
            digest=current.digest,
        )
    body = poll.Commit(
        round_id=current.round_id,
        version=current.version,
        hold=current.hold,
        kv_cache=current.kv_cache,
        in_flight=InFlight.KEEP if member.replica_id in current.not_drained else current.in_flight,
        keep=keep,
    )
    membership.queue(state, member, body, current.commits[member])


def _swapped(state: State, call: PendingCall, *, current: Round, member: Member) -> None:
    current.record(call)
    if member.replica_id in call.answers:
        reason = classify(call).not_done.get(member.replica_id)
        if reason is None and member.version != current.version:
            reason = f"acknowledged version {current.version} but holds {member.version}"
        if reason is not None:
            _fence_until_certain(state, current, member, f"commit: {reason}")


def _fence_until_certain(state: State, current: Round, member: Member, reason: str) -> None:
    if not member.fence_delivered:
        _expect_commit(state, current, member)
        membership.fence(state, member, reason)


def _release(state: State, current: Round) -> None:
    if not current.hold:
        _finish(state, current)
        return
    enter(state, current, RoundPhase.RELEASING)
    bodies = {
        member: poll.Release(round_id=current.round_id) for member in current.participants if member.alive
    }
    membership.send(state, poll.Release.name, bodies, on_complete=partial(_released, current=current))


def _released(state: State, call: PendingCall, *, current: Round) -> None:
    membership.fence_each(state, classify(call).not_done, poll.Release.name)
    _finish(state, current)


def _finish(state: State, current: Round) -> None:
    membership.forget_drain(state, poll.drain_of_round(current.round_id))
    weights_replaced(state)
    report = _end(state, current, RoundPhase.COMMITTED, "")
    # Its holder releases it now or was lost; others must not wait its whole duration.
    state.publisher.expires = min(state.publisher.expires, state.now + RELEASE_S)
    if current.close is not None:
        current.close.finish(result=report)


def weights_replaced(state: State) -> None:
    state.engine_state = intact(state.engine_state)
    state.durable_engine_state = intact(state.durable_engine_state)


_PARTS = {
    RoundPhase.VERIFYING: RoundPart.VERIFY,
    RoundPhase.DRAINING: RoundPart.DRAIN,
    RoundPhase.COMMITTING: RoundPart.COMMIT,
}


def enter(state: State, current: Round, phase: RoundPhase, reason: str = "") -> None:
    current.phase = phase
    current.go_on(_PARTS.get(phase, current.part), state.now)
    state.record(
        "round",
        round_id=current.round_id,
        version=current.version,
        phase=phase.value,
        replicas=[member.replica_id for member in current.remaining()],
        age_s=round(state.now - current.opened_at, 3),
        reason=reason,
    )


def abort(state: State, current: Round, error: SlipstreamError) -> None:
    state.round_errors[current.round_id] = error
    while len(state.round_errors) > KEPT_ROUNDS:
        state.round_errors.popitem(last=False)
    _end(state, current, RoundPhase.ABORTED, error.message)
    if current.close is not None:
        current.close.finish(error=error)
    for call in state.pending:
        if call.round_id == current.round_id:
            call.finish(error=error)


def _end(state: State, current: Round, phase: RoundPhase, reason: str) -> RoundReport:
    enter(state, current, phase, reason)
    committed_at = current.committed_at
    out = {member.replica_id: member.reason for member in current.participants if member.out}
    report = RoundReport(
        round_id=current.round_id,
        version=current.version,
        label=current.label,
        epoch=current.epoch,
        phase=phase.value,
        reason=reason,
        duration_s=state.now - current.opened_at,
        opened_at=state.wall + current.opened_at,
        committed_at=None if committed_at is None else state.wall + committed_at,
        publisher=current.publisher,
        parts={part.value: spent for part, spent in current.parts.items()},
        checks=current.checks,
        digest=current.digest,
        drafter=current.drafter,
        replicas={
            member.replica_id: _timings(current, member.replica_id)
            for member in current.participants
            if not member.out and member.replica_id not in current.left_behind
        },
        fenced={**current.left_behind, **out},
        not_drained=dict(current.not_drained),
    )
    state.decide(Ended(report=report))
    keep(state, report)
    state.round, state.last_round_end = None, state.now
    return report


def _timings(current: Round, replica_id: str) -> ReplicaTimings:
    staged, swapped = current.staged.get(replica_id), current.swapped.get(replica_id)
    return ReplicaTimings(
        bytes=0 if staged is None else staged.size_bytes,
        stage_s=0.0 if staged is None else staged.stage_s,
        verify_s=0.0 if staged is None else staged.verify_s,
        swap_s=0.0 if swapped is None else swapped.swap_s,
        gap_s=0.0 if swapped is None else swapped.gap_s,
    )


def keep(state: State, report: RoundReport) -> None:
    history = state.history
    history.append(report)
    kept = 0
    for index in range(len(history) - 1, -1, -1):
        timings = history[index].replicas
        kept += len(timings)
        if timings and kept > KEPT_TIMINGS and index < len(history) - 1:
            history[index] = replace(history[index], replicas={}, proof={})


def undecided(state: State, round_id: int) -> Round:
    """Raises what aborted the round, or Conflict: not in flight, or decided."""
    current = state.round
    if current is not None and current.round_id == round_id and not current.decided:
        return current
    if round_id in state.round_errors:
        raise state.round_errors[round_id]
    status = "no round is open" if current is None else f"round {current.round_id} is {current.phase}"
    raise Conflict(
        f"round {round_id} is not open: {status}; the fleet is at version {state.committed_version}",
        {"round_id": round_id, "committed_version": state.committed_version},
    )


def require_no_round(state: State, action: str) -> None:
    if state.round is not None:
        raise Conflict(
            f"cannot {action} while round {state.round.round_id} is {state.round.phase}",
            {"round_id": state.round.round_id},
        )


def closed(state: State, round_id: int, label: str | None) -> PendingCall | None:
    """A closed round's outcome; None: it was not closed. Raises Conflict if another publisher closed it: HTTP
    callers share one lease, and only labels differ."""
    current = state.round
    if current is not None and current.round_id == round_id:
        if current.close is not None or current.decided:
            _require_label(round_id, current.label, label)
        if current.close is None and current.decided:
            current.close = PendingCall(name="close_round")
        return current.close
    report = next((each for each in reversed(state.history) if each.round_id == round_id), None)
    if report is None:
        return None
    call = PendingCall(name="close_round")
    if report.phase == RoundPhase.COMMITTED:
        _require_label(round_id, report.label, label)
        call.finish(result=report)
    else:
        call.finish(error=state.round_errors.get(round_id, _aborted_before(report)))
    return call


def _aborted_before(report: RoundReport) -> SlipstreamError:
    message = f"round {report.round_id} aborted: {report.reason}"
    if report.reason == CONTROLLER_RESTARTED:
        return TransferAborted(
            f"{message}; connect again, and send the round again",
            {"round_id": report.round_id, "send_again": True},
        )
    return RoundAborted(message, {"round_id": report.round_id})


def _require_label(round_id: int, closed: str | None, label: str | None) -> None:
    if closed != label:
        raise Conflict(
            f"round {round_id} was closed with the label {closed!r}, by another publisher: what was to be "
            f"published as {label!r} was not; publish it again",
            {"round_id": round_id, "expected": closed, "actual": label},
        )
