"""A restarted controller: folds its predecessor's decisions into a new ledger.

Replicas that served go on serving, so they are waited for until they register again. An undecided
round is gone: replicas that still hold its staging are told to drop it. A decided one that had not
finished is resumed.
"""

from collections.abc import Sequence

from deployments.ledger.commit_phase import CommitPhase
from deployments.ledger.decisions import (
    Aborted,
    Admitted,
    Committed,
    Conditioned,
    Decision,
    DecisionLog,
    Ended,
    EpochChanged,
    Fenced,
    Finished,
    Labelled,
    LeaseIssued,
    Opened,
    Started,
    Stored,
)
from deployments.ledger.desired_state import DesiredState
from deployments.ledger.dispatch import Dispatch
from deployments.ledger.event_log import EventLog
from deployments.ledger.lease import LeaseDesk
from deployments.ledger.membership import Membership
from deployments.ledger.version_state import VersionState


def recover(
    decisions: Sequence[Decision],
    *,
    membership: Membership,
    versions: VersionState,
    lease: LeaseDesk,
    commit_phase: CommitPhase,
    desired_state: DesiredState,
    dispatch: Dispatch,
    events: EventLog,
    log: DecisionLog,
    now: float,
) -> None:
    """Bring a new ledger to where the decisions say the fleet is, and start its generation."""
    generation = 0
    committed: Committed | None = None
    open_round: int | None = None
    admitted: list[Admitted] = []
    for decision in decisions:
        match decision:
            case Started():
                generation = decision.generation
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
            case Opened():
                open_round = decision.round_id
                versions.recover_round_id(decision.round_id)
            case Committed():
                committed, open_round = decision, None
                versions.recover_committed(decision)
            case Labelled():
                versions.recover_label(decision)
            case Aborted():
                open_round = None
            case Finished():
                committed = None
                desired_state.on_weights_replaced()
            case Ended():
                versions.recover_report(decision.report)
            case Conditioned():
                desired_state.recover(decision.condition())
    generation += 1
    dispatch.start_generation(generation)
    events.start_generation(generation)
    log.append(Started(generation=generation))
    events.record("start", now, generation=generation, version=versions.committed_version)
    if open_round is not None:
        log.append(Aborted(round_id=open_round, reason="the controller restarted"))
        events.record("round", now, round_id=open_round, phase="aborted", version=None)
    for each in admitted:
        version = versions.committed_version
        member = membership.recover_member(each.member, version=version, was_serving=True, now=now)
        if member is not None:
            member.condition = desired_state.condition  # as every replica that served
    if committed is not None:
        commit_phase.resume(committed, now)
