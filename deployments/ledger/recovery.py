"""A restarted controller: folds its predecessor's decisions into a new ledger.

Replicas that served go on serving, so they are waited for until they register again. An undecided
round is gone: replicas that still hold its staging are told to drop it. A decided one that had not
finished is resumed.
"""

from collections.abc import Sequence

from deployments.ledger.adapters.loading import Adapters
from deployments.ledger.decisions import (
    Aborted,
    Admitted,
    Cataloged,
    Committed,
    Conditioned,
    Decision,
    DecisionLog,
    Ended,
    EpochChanged,
    EventLog,
    Fenced,
    Finished,
    Founded,
    Labelled,
    LeaseIssued,
    Opened,
    Promised,
    PromiseEnded,
    Scaled,
    Started,
    Stored,
)
from deployments.ledger.desired_state import DesiredState
from deployments.ledger.dispatch import Dispatch
from deployments.ledger.lease import LeaseDesk
from deployments.ledger.membership import Membership
from deployments.ledger.promises import Promises
from deployments.ledger.rounds.commit_phase import CommitPhase
from deployments.ledger.rounds.round import RoundPhase
from deployments.ledger.rounds.version_state import CONTROLLER_RESTARTED, VersionState


def recover(
    decisions: Sequence[Decision],
    *,
    membership: Membership,
    versions: VersionState,
    lease: LeaseDesk,
    commit_phase: CommitPhase,
    desired_state: DesiredState,
    promises: Promises,
    adapters: Adapters,
    dispatch: Dispatch,
    events: EventLog,
    log: DecisionLog,
    now: float,
    new_fleet_id: str,
) -> None:
    """Bring a new ledger to where the decisions say the fleet is, and start its generation."""
    generation = 0
    committed: Committed | None = None
    open_round: int | None = None
    end: tuple[RoundPhase, str] | None = None  # of the last round, and why
    admitted: list[Admitted] = []
    for decision in decisions:
        match decision:
            case Started():
                generation = decision.generation
            case Founded():
                versions.recover_founded(decision)
            case LeaseIssued():
                lease.restart_after(decision.token)
            case EpochChanged():
                membership.recover_epoch(decision.epoch)
            case Fenced():
                membership.recover_fence(decision)
            case Admitted():
                admitted.append(decision)
            case Stored():
                versions.recover_stored(decision)
            case Promised():
                promises.recover(decision, now)
            case PromiseEnded():
                promises.recover_end(decision.incarnation)
            case Opened():
                open_round, end = decision.round_id, None
                versions.recover_round_id(decision.round_id)
            case Committed():
                committed, open_round, end = decision, None, None
                versions.recover_committed(decision)
            case Labelled():
                versions.recover_label(decision)
            case Aborted():
                open_round, end = None, (RoundPhase.ABORTED, decision.reason)
            case Finished():
                committed, end = None, (RoundPhase.COMMITTED, "")
                desired_state.on_weights_replaced()
            case Ended():
                versions.recover_report(decision.report)
            case Conditioned():
                desired_state.recover(decision.condition())
            case Scaled():
                membership.size.recover(decision)
            case Cataloged():
                adapters.recover(decision.catalog)
    generation += 1
    dispatch.start_generation(generation)
    events.start_generation(generation)
    log.append(Started(generation=generation))
    versions.found(new_fleet_id)
    events.record("start", now, generation=generation, version=versions.committed_version)
    if end is not None:
        versions.recover_end(*end, membership.epoch)
    if open_round is not None:
        reason = CONTROLLER_RESTARTED
        log.append(Aborted(round_id=open_round, reason=reason))
        versions.recover_end(RoundPhase.ABORTED, reason, membership.epoch)
        events.record("round", now, round_id=open_round, phase="aborted", version=None, reason=reason)
    for each in admitted:
        version = versions.committed_version
        member = membership.recover_member(each.member, version=version, was_serving=True, now=now)
        if member is not None:
            member.condition = desired_state.condition  # as every replica that served
    if committed is not None:
        commit_phase.resume(committed, now)
