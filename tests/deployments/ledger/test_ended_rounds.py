from deployments.ledger.commit_phase import KEPT_TIMINGS, keep
from deployments.ledger.ledger import Ledger
from deployments.protocol.publishing import ReplicaTimings, RoundReport


def report(round_id: int, replicas: int) -> RoundReport:
    return RoundReport(
        round_id=round_id,
        version=round_id,
        label=None,
        epoch=1,
        phase="committed",
        reason="",
        duration_s=1.0,
        replicas={f"r{number}": ReplicaTimings(swap_s=0.01) for number in range(replicas)},
        fenced={"lost": "out of contact"},
    )


def test_older_rounds_of_a_large_fleet_lose_their_timings_and_nothing_else() -> None:
    state = Ledger().state
    for round_id, replicas in enumerate((800, 800, 800, KEPT_TIMINGS + 1, 2), start=1):
        keep(state, report(round_id, replicas))
        assert len(state.history[-1].replicas) == replicas, "the newest is kept whole"
    assert [len(each.replicas) for each in state.history] == [0, 0, 0, 0, 2]
    assert all(each.fenced for each in state.history)
