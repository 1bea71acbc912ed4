"""A restarted controller: what the decisions of its predecessor say about where the fleet is.

Replicas that served go on serving, so they are waited for until they register again. An undecided
round is gone: replicas that still hold its staging are told to drop it. A decided one that had not
finished is taken up again.
"""

from collections.abc import Sequence

from deployments.ledger.commit_phase import CommitPhase
from deployments.ledger.decisions import (
    Aborted,
    Admitted,
    Committed,
    Conditioned,
    Decision,
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
from deployments.ledger.desired_state import Operations
from deployments.ledger.fleet import Fleet
from deployments.ledger.lease import LeaseDesk
from deployments.ledger.version_state import RoundBook


def recover(
    decisions: Sequence[Decision],
    *,
    fleet: Fleet,
    book: RoundBook,
    lease: LeaseDesk,
    commit_phase: CommitPhase,
    operations: Operations,
    now: float,
) -> None:
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
                fleet.epoch = decision.epoch
            case Fenced():
                fleet.fences[decision.incarnation] = decision
            case Admitted():
                admitted.append(decision)
            case Stored():
                book.stored = decision
            case Opened():
                book.last_round_id = open_round = decision.round_id
            case Committed():
                committed, open_round = decision, None
                book.committed_version, book.label = decision.version, decision.label
                book.persist = decision.persist
            case Labelled() if decision.version == book.committed_version:
                book.label = decision.label
            case Aborted():
                open_round = None
            case Finished():
                committed = None
                operations.weights_came()
            case Ended():
                book.history.append(decision.report)
            case Conditioned():
                operations.recover(decision.steps)
    fleet.start_generation(generation + 1)
    fleet.decisions.append(Started(generation=generation + 1))
    fleet.events.record("start", now, generation=generation + 1, version=book.committed_version)
    if open_round is not None:
        fleet.decisions.append(Aborted(round_id=open_round, reason="the controller restarted"))
        fleet.events.record("round", now, round_id=open_round, phase="aborted", version=None)
    for each in admitted:
        member = fleet.returning(each.member, version=book.committed_version, was_serving=True, now=now)
        if member is not None:
            member.condition = operations.condition  # as every replica that served
    if committed is not None:
        commit_phase.resume(committed, now)
