import logging
from pathlib import Path

import pytest

from deployments.controller.log_lines import LogLines
from deployments.protocol.responses import Event
from tests.deployments.controller.fleet import Fleet, publish


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of each, without what others log."""
    module = "log_lines"
    return [(each.levelname, each.getMessage()) for each in caplog.records if each.module == module]


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


async def test_an_aborted_round_says_why(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    await fleet.serve("a")
    lease = await fleet.controller.acquire("trainer")
    await fleet.controller.connect(lease.token, {})
    await fleet.controller.open_round(lease.token)
    await fleet.controller.release(lease.token)
    (aborted,) = [each for each in lines(caplog) if "aborted" in each[1]]
    assert aborted[0] == "WARNING"
    assert aborted[1].startswith("round 1 is aborted, the fleet keeps its version: round 1 aborted: ")


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
