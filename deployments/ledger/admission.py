"""A member's polls, joining, catch-up and admission.

A joiner receives the committed version in the next round, or loads it from the store if no round comes. If
that leaves it behind again, it waits for a round at least twice as long as before: it converges at any rate
of rounds.

It is admitted between rounds, or during the staging of its own round.
"""

from dataclasses import replace
from functools import partial

from deployments.ledger import (
    commit_phase,
    desired_state,
    membership,
    proof,
    staging_phase,
    stored_versions,
)
from deployments.ledger.state import Delivered, Member, MemberState, PendingCall, State, classify
from deployments.protocol.engine_state import equivalent
from deployments.protocol.errors import FleetUnavailable
from deployments.protocol.poll import (
    CatchUp,
    Directive,
    JoinAnswer,
    Report,
    RunOperation,
    StoredVersion,
    Unloadable,
)


def on_report(state: State, report: Report) -> bool:
    """Returns whether something may follow. A heartbeat, or an acknowledgement that leaves others waiting,
    needs no look at all members."""
    known = state.find(report.replica_id, report.incarnation)
    if known is not None and (report.number < known.last_report or _is_of_before(state, known, report)):
        raise FleetUnavailable(f"a later report of {report.replica_id} overtook this one")
    quiet = known is not None and _says_nothing_new(known, report)
    epoch = state.epoch
    member = membership.register(state, report)
    if member is None:
        return True
    if member.out:
        if report.fenced:
            membership.on_fence_delivered(state, member)
        return True
    _copy(state, member, report)
    follows = stored_versions.on_report(state, member, report)
    if member.state is MemberState.RETURNING:
        commit_phase.on_return(state, member, report)
    if membership.on_acknowledgements(state, member, report.acknowledgements):
        follows = True
        membership.run_completed(state)
    if report.failed:  # its engine died, or it failed in an instruction of an earlier controller
        membership.fence(state, member, report.failed)
    _check_version(state, member)
    if member.alive:
        current = None if state.round is None else state.round.round_id
        # Else of a round that ended, or that a restarted controller never decided.
        if report.staged_round not in (None, current):
            staging_phase.drop(state, member, report.staged_round)
        if report.scores is not None:
            proof.on_scores(state, report.scores, member.replica_id)
    if report.ended:
        gone(state, member, "it was stopped, and ended before the fleet let it go")
    return follows or not quiet or state.epoch != epoch


def _is_of_before(state: State, member: Member, report: Report) -> bool:
    """The restart: its number cannot be compared. A member that served holds the committed version, or the
    one before it until it swaps; one that left in order may be behind."""
    if member.state is not MemberState.RETURNING or not member.was_serving:
        return False
    swaps = state.round is not None
    return report.version < state.committed_version - swaps and not (report.leaving and report.drained)


def _says_nothing_new(member: Member, report: Report) -> bool:
    return (
        member.state is MemberState.SERVING
        and not report.leaving
        and member.draining == report.draining
        and member.adapters == report.adapters
        and equivalent(member.engine_state, report.condition)
        and member.loading_version == report.loading_version
    )


def _copy(state: State, member: Member, report: Report) -> None:
    member.last_poll, member.last_report, member.version = state.now, report.number, report.version
    member.loading_version, member.initial = report.loading_version, report.initial
    member.endpoint = report.endpoint
    member.adapters = report.adapters
    member.updates_in_place, member.draining = report.updates_in_place, report.draining
    if not member.has_queued(RunOperation) and not equivalent(member.engine_state, report.condition):
        member.engine_state = report.condition
    membership.on_draining(state, member)
    if report.leaving and not member.leaving:
        state.record("leaving", replica=member.replica_id, version=member.version)
    member.leaving, member.drained = report.leaving, report.drained


def _check_version(state: State, member: Member) -> None:
    committed, current = state.committed_version, state.round
    swapping = current is not None and member in current.commits
    if member.departing:
        return
    if member.version > committed:
        reason = f"holds version {member.version}, the fleet never went past {committed}"
        membership.fence(state, member, reason)
    elif member.state is MemberState.SERVING and member.version != committed and not swapping:
        reason = f"serves version {member.version}, the fleet is at {committed}"
        membership.fence(state, member, reason)


def directive(state: State, report: Report) -> Directive:
    """May get lost; a fence has arrived once the replica reports it."""
    fenced = state.fences.get(report.incarnation)
    member = state.find(report.replica_id, report.incarnation)
    if member is not None:
        member.delivered = _deliverable(state, member)
        for queued in member.queue:
            queued.delivered = True
    return Directive(
        admitted=member is not None and member.state is MemberState.SERVING and not member.leaving,
        instructions=() if member is None else tuple(queued.instruction for queued in member.queue),
        acknowledged=tuple(each.seq for each in report.acknowledgements),
        fenced=None if fenced is None else fenced.reason,
        may_leave=member is not None and _may_leave(state, member),
        desired=state.desired,
    )


def has_updates(state: State, report: Report) -> bool:
    member = state.find(report.replica_id, report.incarnation)
    return member is None or member.out or member.delivered != _deliverable(state, member)


def _deliverable(state: State, member: Member) -> Delivered:
    queued = member.queue[-1].instruction.seq if member.queue else 0
    delivered = 0 if member.delivered is None else member.delivered.last_seq
    return Delivered(
        state=member.state,
        last_seq=max(queued, delivered),
        may_leave=_may_leave(state, member),
        desired=state.desired,
    )


def gone(state: State, member: Member, reason: str) -> None:
    """Its process exits or has exited: gracefully if nothing waits for it, else it is lost."""
    if _may_leave(state, member):
        membership.leave(state, member)
    else:
        membership.lose(state, member, reason)


def _may_leave(state: State, member: Member) -> bool:
    if not (member.departing and member.alive) or member.queue:
        return False
    return state.round is None or member not in state.round.participants


def first_weights(
    state: State, replica_id: str, incarnation: str, unloadable: Unloadable | None
) -> JoinAnswer:
    if unloadable is not None:
        stored_versions.refuse(state, replica_id, incarnation, unloadable.version, unloadable.reason)
    told = state.stored
    if told is None or stored_versions.refused(state, incarnation, told.version):
        served = state.initial is not None and bool(state.serving() or state.returning())
        return JoinAnswer(initial=state.initial, served=served)
    return JoinAnswer(stored=stored_version(state, told.version, told.path))


def stored_version(state: State, version: int, path: str) -> StoredVersion:
    endpoints = (each.endpoint for each in state.live() if each.endpoint is not None)
    return StoredVersion(
        version=version,
        path=path,
        fleet_id=state.fleet_id,
        digest=state.digest_of(version),
        holders=() if state.config.shared_store else tuple(endpoints),
    )


def advance(state: State) -> None:
    """Bring joiners to the committed version and the fleet's engine state, then admit them. Serving
    members may have missed an operation when the controller restarted."""
    current = state.round
    for member in state.live():
        serving = member.state is MemberState.SERVING
        if serving and member.engine_state != state.engine_state and current is None:
            desired_state.converge(state, member)
        if serving or member.leaving:
            continue
        if member.version != state.committed_version:
            _catch_up(state, member)
        elif (
            (current is None or (not current.decided and member in current.participants))
            and member.adapters_number == state.adapters.number
            and desired_state.converge(state, member)
            and _holds_version_0(state, member)
        ):
            membership.admit(state, member)


def _holds_version_0(state: State, member: Member) -> bool:
    """At version 0: whether its weights are those of the first member that served it; else it is fenced."""
    if state.committed_version or state.initial == member.initial:
        return True
    if state.initial is not None:
        found = "unknown weights" if member.initial is None else member.initial
        membership.fence(state, member, f"loaded {found} as version 0, which is {state.initial}")
        return False
    assert state.founded is not None, "members are admitted after `recover`"
    state.found(replace(state.founded, initial=member.initial))
    return True


def _catch_up(state: State, member: Member) -> None:
    stored = state.stored
    if state.round is not None or member.loading or member.has_queued(CatchUp):
        return
    if state.now - state.last_round_end < member.patience_s:
        return
    if stored is None or stored.version != state.committed_version:
        return
    if stored_versions.refused(state, member.incarnation, stored.version):
        return
    body = CatchUp(stored=stored_version(state, stored.version, stored.path))
    on_complete = partial(_caught_up, version=stored.version, sent=state.now)
    membership.send(state, CatchUp.name, {member: body}, on_complete=on_complete)


def _caught_up(state: State, call: PendingCall, *, version: int, sent: float) -> None:
    verdict = classify(call)
    for replica_id, reason in verdict.rejected.items():
        member = state.members[replica_id]
        stored_versions.refuse(state, replica_id, member.incarnation, version, reason)
    reasons = {**verdict.transfer_failed, **verdict.replica_failed}
    for replica_id in verdict.done:
        member = state.members[replica_id]
        if version != state.committed_version:
            member.patience_s = max(2 * member.patience_s, state.now - sent)
        if member.version != version:
            reasons[replica_id] = f"loaded version {version} but holds {member.version}"
    membership.fence_each(state, reasons, CatchUp.name)
