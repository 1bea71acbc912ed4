from deployments.ledger.rounds.version_state import KEPT_TIMINGS, EndedRounds
from deployments.protocol.publishing import ReplicaTimings, RoundReport

TIMINGS = ReplicaTimings(bytes=1)


def report(round_id: int, replicas: int) -> RoundReport:
    return RoundReport(
        round_id=round_id,
        version=round_id,
        label=None,
        epoch=1,
        phase="committed",
        reason="",
        duration_s=1.0,
        replicas={f"r{number}": TIMINGS for number in range(replicas)},
    )


def test_the_newest_rounds_of_a_large_fleet_keep_the_timings_of_each_replica_and_older_ones_do_not() -> None:
    history = EndedRounds()
    for round_id in range(1, 6):
        history.append(report(round_id, KEPT_TIMINGS // 2))
    assert [len(each.replicas) for each in history.all()] == [0, 0, 0, KEPT_TIMINGS // 2, KEPT_TIMINGS // 2]
    assert [each.round_id for each in history.newest_first()] == [5, 4, 3, 2, 1]


def test_the_newest_round_is_whole_however_large_the_fleet_is() -> None:
    history = EndedRounds()
    for round_id in (1, 2):
        history.append(report(round_id, 2 * KEPT_TIMINGS))
    assert [len(each.replicas) for each in history.all()] == [0, 2 * KEPT_TIMINGS]
