"""A restarted controller: folds its predecessor's decisions into a new state.

Replicas that served keep serving, so they are waited for until they register again. An undecided round is
aborted: replicas that still hold its staging are told to drop it. A decided one that had not finished is
resumed.
"""

from collections.abc import Iterable

from deployments.ledger import commit_phase, membership
from deployments.ledger.decisions import (
    Aborted,
    Admitted,
    Cataloged,
    Committed,
    Decision,
    Ended,
    EngineStateChanged,
    EpochChanged,
    Fenced,
    Finished,
    Founded,
    Labelled,
    LeaseIssued,
    Opened,
    Pinned,
    Scaled,
    Started,
    Stored,
    Unpinned,
)
from deployments.ledger.state import ID_SPAN, Pin, RoundPhase, State
from deployments.protocol.poll import DesiredReplicas
from deployments.protocol.publishing import RoundReport


def recover(state: State, decisions: Iterable[Decision], new_fleet_id: str) -> None:
    """Bring a new state to where the decisions say the fleet is, and start its generation."""
    generation = 0
    committed: Committed | None = None  # and not finished
    open_round: int | None = None
    end: tuple[RoundPhase, str] | None = None  # of the last round, and why
    admitted: list[Admitted] = []
    for decision in decisions:
        match decision:
            case Started():
                generation = decision.generation
            case Admitted():
                admitted.append(decision)
            case Opened():
                state.last_round_id = open_round = decision.round_id
                end = None
            case Committed():
                committed, open_round, end = decision, None, None
                state.committed_version, state.label = decision.version, decision.label
                state.persist = decision.persist
            case Aborted():
                open_round, end = None, (RoundPhase.ABORTED, decision.reason)
            case Finished():
                committed, end = None, (RoundPhase.COMMITTED, "")
                commit_phase.weights_replaced(state)
            case _:
                _fold(state, decision)
    generation += 1
    # Replicas ignore sequence numbers that they have seen.
    state.next_seq = state.events.next_id = generation * ID_SPAN + 1
    state.decide(Started(generation=generation))
    if state.founded is None:
        state.founded = Founded(fleet_id=new_fleet_id)
        state.decide(state.founded)
    state.record("start", generation=generation, version=state.committed_version)
    if end is not None:
        _recover_end(state, *end)
    if open_round is not None:
        reason = commit_phase.CONTROLLER_RESTARTED
        state.decide(Aborted(round_id=open_round, reason=reason))
        _recover_end(state, RoundPhase.ABORTED, reason)
        state.record("round", round_id=open_round, phase="aborted", version=None, reason=reason)
    for each in admitted:
        version = state.committed_version
        member = membership.recover_member(state, each.member, version=version, was_serving=True)
        if member is not None:
            member.engine_state = state.engine_state  # like every replica that served
    if committed is not None:
        commit_phase.resume(state, committed)


def _fold(state: State, decision: Decision) -> None:
    match decision:
        case Founded():
            state.founded = decision
        case LeaseIssued():
            state.publisher.last_token = decision.token
        case EpochChanged():
            state.epoch = decision.epoch
        case Fenced():
            state.fences[decision.incarnation] = decision
        case Stored():
            state.stored = decision
        case Pinned():
            state.pins[decision.incarnation] = Pin(decision=decision, since=state.now)
        case Unpinned():
            state.pins.pop(decision.incarnation, None)
        case Labelled():
            if decision.version == state.committed_version:
                state.label = decision.label
        case Ended():
            commit_phase.keep(state, decision.report)
        case EngineStateChanged():
            state.engine_state = state.durable_engine_state = decision.condition()
        case Scaled():
            state.desired = DesiredReplicas(wanted=decision.wanted, number=decision.number)
        case Cataloged():
            state.adapters.catalog, state.adapters.recovered = decision.catalog, True


def _recover_end(state: State, phase: RoundPhase, reason: str) -> None:
    """The last round has ended, and its predecessor may not have written its entry in the history."""
    if commit_phase.ended(state, state.last_round_id) is not None:
        return
    committed = phase is RoundPhase.COMMITTED
    report = RoundReport(
        round_id=state.last_round_id,
        version=state.committed_version + (0 if committed else 1),
        label=state.label if committed else None,
        epoch=state.epoch,
        phase=phase.value,
        reason=reason,
        duration_s=0.0,
    )
    commit_phase.keep(state, report)
    state.decide(Ended(report=report))
