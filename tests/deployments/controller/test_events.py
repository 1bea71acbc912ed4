"""What the log and the metrics say of events."""

import logging
from pathlib import Path

import pytest

from deployments.controller.events import LogLines, count, kind_of
from deployments.protocol.publishing import ReplicaTimings, RoundReport
from deployments.protocol.responses import Event
from deployments.serve.instruments import FENCES, ROUND, ROUND_GAP, ROUND_PART
from tests.deployments.controller.fleet import Fleet, publish
from tests.deployments.recorded import Recorded


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of each, without what others log."""
    return [(each.levelname, each.getMessage()) for each in caplog.records if each.module == "events"]


@pytest.fixture(autouse=True)
def serve_logs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    caplog.set_level(logging.INFO)


async def test_a_round_and_a_lost_replica_have_one_line_each(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.serve("a", "b")
    await publish(fleet)
    fleet.kill("b")
    await fleet.elapse(2.5)
    await fleet.members(1)
    (committed,) = [each for each in lines(caplog) if "committed on" in each[1]]
    assert committed[0] == "INFO" and committed[1].startswith(
        "version 1 is committed on 2 replicas (round 1, "
    )
    (lost,) = [each for each in lines(caplog) if "is lost" in each[1]]
    assert lost == (
        "WARNING",
        "replica b is lost: its process is gone. Its requests are retried on others; Serve replaces it",
    )


def event(number: int, name: str, **fields: object) -> Event:
    return Event(event_id=number, name=name, at=0.0, fields=fields)  # type: ignore[arg-type]


def test_a_fence_names_the_round_in_which_it_happened(caplog: pytest.LogCaptureFixture) -> None:
    log = LogLines()
    log.write(
        [
            event(1, "round", round_id=4, version=3, phase="verifying"),
            event(2, "fence", replica="b", reason="verify: its digest differs", epoch=2),
            event(3, "lost", replica="b", reason="its process is gone", epoch=2),
        ]
    )
    assert lines(caplog) == [
        (
            "WARNING",
            "replica b is fenced in round 4 (verifying): verify: its digest differs. "
            "It gets no requests; Serve replaces it",
        ),
        ("INFO", "the process of fenced replica b is gone"),
    ]
    assert log.last_id == 3


@pytest.mark.parametrize(
    ("name", "fields", "phrase"),
    [
        ("start", {"version": 3}, "controller started"),
        ("join", {"replica": "a", "version": 3}, "starts and loads version"),
        ("admit", {"replica": "a", "version": 3}, "serves version"),
        ("fence", {"replica": "a", "reason": "x"}, "is fenced"),
        ("lost", {"replica": "a", "reason": "x"}, "is lost"),
        (
            "round",
            {"round_id": 1, "phase": "aborted", "reason": "x"},
            "is aborted, the fleet keeps its version",
        ),
        ("scale", {"wanted": 3}, "operator set"),
        ("leaving", {"replica": "a", "version": 3}, "is being stopped"),
        ("left", {"replica": "a"}, "has left"),
        ("lease_expired", {"publisher": "t"}, "the lease of publisher"),
        (
            "drain_expired",
            {"what": "round 1", "timeout_s": 9.0, "running": {"a": 2, "b": -1}, "then": "abort"},
            "requests still run after",
        ),
        ("not_stored", {"version": 3, "reason": "x"}, "is not in the store"),
        ("refused", {"replica": "a", "version": 0, "reason": "x"}, "is refused"),
        ("unloadable", {"replica": "a", "version": 3, "reason": "x"}, "cannot load version"),
        ("adapter", {"lora_name": "a", "version": 3, "phase": "live"}, "is live on all serving replicas"),
        ("adapter", {"lora_name": "a", "version": 3, "phase": "retired"}, "is retired"),
        (
            "adapter",
            {"lora_name": "a", "version": 3, "phase": "failed", "reason": "x"},
            "was not loaded on any replica",
        ),
    ],
)
def test_the_runbook_explains_each_line(
    caplog: pytest.LogCaptureFixture, name: str, fields: dict[str, object], phrase: str
) -> None:
    LogLines().write([event(1, name, **fields)])
    ((_, text),) = lines(caplog)
    assert phrase in text
    assert f"`{phrase}" in Path("docs/operating/runbook.md").read_text()


# -- counts -----------------------------------------------------------------------------------------


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
