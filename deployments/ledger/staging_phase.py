"""A round until its decision: opened, staged, closed and verified, or aborted. No live weight is touched.

open ─► send* ─► RECEIVE ─► close ─► VERIFY ─► digests equal ─► (DRAIN) ─► the decision to commit
  └─────────── abort: publisher, lease, wrong payload, failed transfer, too few replicas ─► DROP

`in_flight: wait` drains before the decision, or before a RECEIVE that changes live weights.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from pydantic import JsonValue

from deployments.ledger import commit_phase, membership, publisher_session
from deployments.ledger.decisions import Opened
from deployments.ledger.state import (
    Member,
    PendingCall,
    PendingDrain,
    Round,
    RoundPart,
    RoundPhase,
    State,
    Verdict,
    classify,
    first_ranks,
    join_reasons,
)
from deployments.protocol import errors, poll
from deployments.protocol.publishing import RoundOptions


def open_round(state: State, publisher: str, options: RoundOptions) -> int:
    """With every free member, joiners included: a round carries all weights."""
    members = _eligible(state)
    _check_after(state, options.after)
    connection = None
    if options.file_bytes is None:
        connection = publisher_session.connection_to(state, publisher, members)

    config = state.config
    state.last_round_id += 1
    state.decide(Opened(round_id=state.last_round_id))
    state.round = Round(
        round_id=state.last_round_id,
        version=state.committed_version + 1,
        label=None,
        epoch=state.epoch,
        opened_at=state.now,
        part_since=state.now,
        publisher=publisher,
        participants=tuple(members),
        connection=connection,
        commit=config.commit,
        kv_cache=config.kv_cache,
        in_flight=config.in_flight,
        persist=options.persist and state.config.outside_versions,
        file_bytes=options.file_bytes,
    )
    commit_phase.enter(state, state.round, RoundPhase.OPEN)
    for member in members:
        membership.withdraw(member, lambda body: isinstance(body, poll.CatchUp), delivered=False)
    return state.last_round_id


def _check_after(state: State, after: int | None) -> None:
    """These weights would undo a version that their publisher has not seen."""
    committed = state.committed_version
    if after not in (None, committed):
        raise errors.Conflict(
            f"version {committed} is committed, and these weights continue from version {after}: nothing is "
            f'published. Go back to one of them (POST /fleet/rollback), or publish with "after": {committed} '
            "to replace it",
            {"expected": after, "version": committed},
        )


def _eligible(state: State) -> list[Member]:
    if state.round is not None:
        current = state.round
        raise errors.Conflict(
            f"round {current.round_id} is {current.phase}: close or abort it before opening another",
            {"round_id": current.round_id, "phase": current.phase.value},
        )
    if absent := [member.replica_id for member in state.returning()]:  # the round would leave them behind
        raise errors.FleetUnavailable(
            f"the controller restarted and replicas {absent} have not polled yet; try again",
            {"replicas": absent},
        )
    members, needed = state.for_round(), state.needed
    if len(members) < needed:
        raise errors.FleetUnavailable(
            f"a round needs at least {needed} replicas, {len(members)} are registered",
            {"expected": needed, "actual": len(members)},
        )
    return members


def send(state: State, round_id: int, payload: JsonValue | poll.FilePart) -> PendingCall:
    current = _open_round(state, round_id)
    parts = _split(payload, current.participants)
    current.go_on(RoundPart.STAGE, state.now)
    current.sent_bytes += payload.size_bytes if isinstance(payload, poll.FilePart) else 0
    members = current.remaining()
    call = PendingCall(name=poll.Receive.name, waiting=set(members), on_complete=_answered, round_id=round_id)
    state.pending.append(call)

    def queue() -> None:
        for member in current.remaining():
            if member in call.waiting:
                body = poll.Receive(
                    round_id=round_id,
                    payload=parts[member],
                    retain_version=current.version if state.retains(current) else None,
                    in_flight=current.in_flight,
                )
                membership.queue(state, member, body, call)

    if current.must_drain and any(member.updates_in_place for member in members):
        _drain(state, current, queue)  # the first payload changes live weights: no request may run by then
    else:
        queue()
    return call


def close(state: State, round_id: int, label: str | None) -> PendingCall:
    current = _open_round(state, round_id)
    current.label, current.close = label, PendingCall(name="close_round")
    commit_phase.enter(state, current, RoundPhase.VERIFYING)
    bodies = {member: poll.Verify(round_id=round_id) for member in current.remaining()}
    membership.send(state, poll.Verify.name, bodies, on_complete=_answered, round_id=round_id)
    return current.close


def _open_round(state: State, round_id: int) -> Round:
    current = commit_phase.undecided(state, round_id)
    if current.phase is not RoundPhase.OPEN:
        raise errors.Conflict(f"round {round_id} is {current.phase}, expected open", {"round_id": round_id})
    return current


def _split(
    payload: JsonValue | poll.FilePart, members: Sequence[Member]
) -> dict[Member, JsonValue | poll.FilePart]:
    if not isinstance(payload, list):
        return dict.fromkeys(members, payload)
    workers = sum(member.world_size for member in members)
    if len(payload) != workers:
        raise errors.InvalidRequest(
            f"payload: expected one entry for each of {workers} workers, got {len(payload)}",
            {"expected": workers, "actual": len(payload)},
        )
    return {
        member: payload[first : first + member.world_size]
        for member, first in zip(members, first_ranks(members), strict=True)
    }


def abort(state: State, current: Round, error: errors.SlipstreamError) -> None:
    commit_phase.abort(state, current, error)
    for member in current.remaining():
        membership.withdraw(member, lambda body: isinstance(body, poll.Receive | poll.Verify), delivered=True)
        drop(state, member, current.round_id)
    in_place = any(member.updates_in_place for member in current.participants)
    if not in_place:
        publisher_session.break_connection(state, current.connection, current.round_id)
    for call in _receives(state, current):
        call.waiting.clear()
    membership.forget_drain(state, poll.drain_of_round(current.round_id))


def abandon(state: State, why: str) -> None:
    publisher_session.cancel_rendezvous(state)
    current = state.round
    if current is not None and not current.decided:
        error = errors.RoundAborted(
            f"round {current.round_id} aborted: {why}", {"round_id": current.round_id}
        )
        abort(state, current, error)


def drop(state: State, member: Member, round_id: int) -> None:
    """A member that cannot confirm unchanged weights is fenced."""
    if not member.has_queued(poll.Drop):
        membership.send_or_fence(state, member, poll.Drop(round_id=round_id))


def advance(state: State) -> None:
    current = state.round
    if current is not None and not current.decided:
        _check_quorum(state, current)
    current = state.round
    if current is not None and current.phase in (RoundPhase.VERIFIED, RoundPhase.DRAINING):
        _decide(state, current)


def _check_quorum(state: State, current: Round) -> None:
    collective = current.connection is not None and current.connection.collective
    receiving = next(iter(_receives(state, current)), None) if collective else None
    if receiving is not None:  # not only after the last answer: the others wait for the failed one
        membership.fence_each(state, classify(receiving).replica_failed, poll.Receive.name)
    remaining, needed = current.remaining(), state.needed
    out = {member.replica_id: member.reason for member in current.participants if member.out}
    if len(remaining) < needed:
        error = errors.RoundAborted(
            f"round {current.round_id} aborted: {len(remaining)} of {len(current.participants)} replicas "
            f"remain, at least {needed} must: {join_reasons(out)}",
            {
                "round_id": current.round_id,
                "remaining": len(remaining),
                "min_replicas": needed,
                "replicas": out,
            },
        )
        abort(state, current, error)
    elif out and receiving is not None:  # a communicator is of no use without one of its members
        abort(state, current, _transfer_failed(current, out))


def _receives(state: State, current: Round) -> list[PendingCall]:
    return [
        call for call in state.pending if call.name == poll.Receive.name and call.round_id == current.round_id
    ]


def _decide(state: State, current: Round) -> None:
    """With `together` no replica may serve the old version without consent: every fence is
    delivered first."""
    together = current.commit is poll.CommitMode.TOGETHER
    if together and state.uncertain():
        return
    if not together or not current.must_drain:
        commit_phase.decide(state, current)
    elif current.phase is RoundPhase.VERIFIED:
        commit_phase.enter(state, current, RoundPhase.DRAINING)
        _drain(state, current, lambda: None)


def _drain(state: State, current: Round, drained: Callable[[], None]) -> None:
    """If requests outlast the timeout, the round aborts and `drained` does not run."""

    def ended(drain: PendingDrain) -> None:
        current.not_drained, current.drained = drain.late, True
        if drain.late:
            abort(state, current, _not_drained(current, state.config.drain_timeout_s))
        else:
            drained()

    membership.begin_drain(
        state,
        poll.drain_of_round(current.round_id),
        current.remaining(),
        what=f"round {current.round_id}",
        then="abort",
        on_end=ended,
    )


def _not_drained(current: Round, timeout_s: float) -> errors.RoundAborted:
    running = membership.still_running(current.not_drained)
    return errors.RoundAborted(
        f"round {current.round_id} aborted: 'in_flight' is 'wait', and requests still ran after "
        f"drain_timeout_s = {timeout_s:g} s ({running}); try again, raise 'weights.drain_timeout_s', or set "
        "'weights.in_flight' to 'keep'",
        {"round_id": current.round_id, "running": dict(current.not_drained), "timeout_s": timeout_s},
    )


def _answered(state: State, call: PendingCall) -> None:
    current = state.round
    if current is None or current.round_id != call.round_id:
        return
    current.record(call)
    if current.part is RoundPart.STAGE and not _receives(state, current):
        current.go_on(RoundPart.SEND, state.now)
    verdict = classify(call)
    error: errors.SlipstreamError
    if current.file_bytes is not None and (verdict.rejected or verdict.transfer_failed):
        membership.fence_each(state, verdict.replica_failed, call.name)
        error = _files_refused(current, verdict)
    else:
        membership.fence_each(state, verdict.to_fence, call.name)
        missing = {} if current.connection is None else current.connection.missing(call)
        membership.count_failed_transfers(state, call, missing)
        if verdict.publisher_at_fault:
            rejected = dict(verdict.rejected)
            error = errors.InvalidRequest(
                f"round {current.round_id} aborted: every replica rejected {call.name}: "
                f"{join_reasons(rejected)}",
                {"round_id": current.round_id, "phase": call.name, "replicas": rejected},
            )
        elif verdict.transfer_failed:
            error = _transfer_failed(current, {**call.absent, **verdict.transfer_failed})
        elif call.name == poll.Verify.name:
            _compare(state, current)
            return
        else:
            return
    call.finish(error=error)  # it is no longer among the pending calls, which the abort ends
    abort(state, current, error)


def _compare(state: State, current: Round) -> None:
    staged = {member.replica_id: current.staged[member.replica_id] for member in current.remaining()}
    for member in current.remaining():
        member.failed_transfers = 0
    digests = {replica_id: each.digest for replica_id, each in staged.items()}
    counts = Counter(digests.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        reason = f"round {current.round_id} aborted: replicas disagree, no majority: {join_reasons(digests)}"
        abort(state, current, errors.RoundAborted(reason, {"replicas": digests}))
        return
    minority = {
        replica_id: f"its digest {digest} differs from the others' {counts[0][0]}"
        for replica_id, digest in digests.items()
        if digest != counts[0][0]
    }
    membership.fence_each(state, minority, poll.Verify.name)
    agreed = [each for replica_id, each in staged.items() if replica_id not in minority]
    _record_checks(current, agreed, among=len(staged))
    if any(each.drafter is not None for each in agreed):
        current.drafter = current.version if any(each.drafter for each in agreed) else state.drafter or 0
    commit_phase.enter(state, current, RoundPhase.VERIFIED)


def _record_checks(current: Round, agreed: Sequence[poll.Staged], *, among: int) -> None:
    current.checks = tuple(check for check in poll.Check if all(check in each.checks for each in agreed))
    if among > 1:
        current.checks += (poll.Check.REPLICAS,)
    # A model that loads in place digests its live parameters, not the tensors that arrived.
    if agreed and not any(each.updates_in_place for each in current.remaining()):
        current.digest = agreed[0].digest


def _files_refused(current: Round, verdict: Verdict) -> errors.InvalidRequest | errors.RoundAborted:
    """Wrong files, or files that differ between hosts, are no replica's fault."""
    refused = {**verdict.rejected, **verdict.transfer_failed}
    detail = {"round_id": current.round_id, "replicas": refused}
    if verdict.done:
        reasons = join_reasons(refused)
        return errors.RoundAborted(
            f"round {current.round_id} aborted: not every replica read the same: {reasons}", detail
        )
    reason = refused[min(refused)]  # the others' is the same, except for what cannot be read anywhere
    return errors.InvalidRequest(
        f"round {current.round_id} aborted: no replica takes this checkpoint: {reason}", detail
    )


def _transfer_failed(current: Round, replicas: dict[str, str]) -> errors.TransferAborted:
    return errors.TransferAborted(
        f"round {current.round_id} aborted: the transfer failed; connect again, and send the round again: "
        f"{join_reasons(replicas)}",
        {"round_id": current.round_id, "send_again": True, "replicas": replicas},
    )
