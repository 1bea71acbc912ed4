"""A restarted controller folds its predecessor's decisions into a new state.

The replicas that served must register again. An undecided round is aborted, a decided one resumed.
"""

from collections.abc import Iterable

from deployments.ledger import commit_phase, decisions, membership
from deployments.ledger.state import ID_SPAN, RoundPhase, State
from deployments.protocol.poll import DesiredReplicas
from deployments.protocol.publishing import RoundReport


def recover(state: State, journal: Iterable[decisions.Decision], new_fleet_id: str) -> None:
    generation = 0
    committed: decisions.Committed | None = None
    open_round: int | None = None
    admitted: list[decisions.Participant] = []
    for decision in journal:
        match decision:
            case decisions.Started():
                generation = decision.generation
            case decisions.Admitted():
                admitted.append(decision.member)
                state.epoch = decision.epoch
            case decisions.Opened():
                state.last_round_id = open_round = decision.round_id
            case decisions.Committed():
                committed, open_round = decision, None
                state.committed_version, state.label = decision.version, decision.label
                state.persist, state.drafter = decision.persist, decision.drafter
            case decisions.Ended():
                open_round = None
                commit_phase.keep(state, decision.report)
                if decision.report.phase == RoundPhase.COMMITTED:
                    committed = None
                    behind = decision.report.fenced.keys()  # or they join again, without a fence
                    admitted = [
                        each
                        for each in admitted
                        if each.replica_id not in behind or each.incarnation in state.fences
                    ]
                    commit_phase.weights_replaced(state)
            case _:
                _fold(state, decision)
    generation += 1
    # Replicas ignore sequence numbers that they have seen.
    state.next_seq = state.next_event_id = generation * ID_SPAN + 1
    state.decide(decisions.Started(generation=generation))
    if state.founded is None:
        state.found(decisions.Founded(fleet_id=new_fleet_id))
    state.record("start", generation=generation, version=state.committed_version)
    if open_round is not None:
        _abort(state, open_round)
    for each in admitted:
        membership.recover_member(state, each, version=state.committed_version, was_serving=True)
    if committed is not None:
        commit_phase.resume(state, committed)


def _fold(state: State, decision: decisions.Decision) -> None:
    match decision:
        case decisions.Founded():
            state.founded = decision
        case decisions.LeaseIssued():
            state.publisher.last_token = decision.token
        case decisions.Fenced():
            state.fences[decision.incarnation] = decision
            state.epoch = decision.epoch
        case decisions.Stored():
            state.stored = decision
        case decisions.Labelled():
            if decision.version == state.committed_version:
                state.label = decision.label
        case decisions.EngineStateChanged():
            state.engine_state = state.durable_engine_state = decision.steps
        case decisions.Scaled():
            state.desired = DesiredReplicas(wanted=decision.wanted, number=decision.number)
        case decisions.Cataloged():
            state.adapters.catalog, state.adapters.number = decision.catalog, 1


def _abort(state: State, round_id: int) -> None:
    report = RoundReport(
        round_id=round_id,
        version=state.committed_version + 1,
        label=None,
        epoch=state.epoch,
        phase=RoundPhase.ABORTED.value,
        reason=commit_phase.CONTROLLER_RESTARTED,
        duration_s=0.0,
        opened_at=state.wall + state.now,
    )
    commit_phase.keep(state, report)
    state.decide(decisions.Ended(report=report))
    state.record("round", round_id=round_id, phase="aborted", version=None, reason=report.reason)
