import pytest

from deployments.controller.event_counts import count, kind_of
from deployments.protocol.publishing import ReplicaTimings, RoundReport
from deployments.protocol.responses import Event
from deployments.serve.instruments import FENCES, ROUND, ROUND_GAP, ROUND_PART
from tests.deployments.recorded import Recorded


def report(round_id: int, phase: str) -> RoundReport:
    return RoundReport(
        round_id=round_id,
        version=round_id,
        label=None,
        epoch=1,
        phase=phase,
        reason="",
        duration_s=2.0,
        parts={"stage": 1.5, "commit": 0.5},
        replicas={"r0": ReplicaTimings(gap_s=0.01), "r1": ReplicaTimings(gap_s=0.02)},
    )


def ended(round_id: int, phase: str) -> Event:
    return Event(event_id=round_id, name="round", at=0.0, fields={"round_id": round_id, "phase": phase})


def test_a_round_is_counted_once_when_it_has_ended() -> None:
    recorded = Recorded()
    events = [ended(1, "open"), ended(1, "committing"), ended(1, "committed"), ended(2, "aborted")]
    count(events, [report(1, "committed"), report(2, "aborted")], recorded)
    assert recorded.values(ROUND, "outcome") == {"committed": [2.0], "aborted": [2.0]}
    assert recorded.values(ROUND_PART, "part") == {"stage": [1.5], "commit": [0.5]}
    assert recorded.values(ROUND_GAP) == {None: [0.01, 0.02]}


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("receive: the connection was reset", "receive"),
        ("catch_up: done, and it does not hold it", "catch_up"),
        ("missed the deadline of commit (60 s)", "deadline"),
        ("RuntimeError: CUDA error", "other"),
        ("condition: pause: it does not answer", "condition"),
    ],
)
def test_fences_are_counted_by_kind_and_not_by_sentence(reason: str, kind: str) -> None:
    recorded = Recorded()
    event = Event(event_id=1, name="fence", at=0.0, fields={"replica": "r0", "reason": reason, "epoch": 1})
    count([event], [], recorded)
    assert recorded.values(FENCES, "reason") == {kind: [1.0]}
    assert kind_of(reason) == kind
