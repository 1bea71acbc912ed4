"""What an operator sees, and plain text in a pipe."""

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from app.command import tables
from app.command.asking import tokens_per_s
from deployments.protocol.adapters import AdapterStatus, AdapterTimings
from deployments.protocol.publishing import ReplicaTimings
from deployments.protocol.responses import FleetLoad, LeaseStatus, ReplicaLoad
from tests.app.http.fake_status import report, status

LOADS = {"replica-0": ReplicaLoad(running=12, waiting=3, kv_cache_use=0.42, generated_tokens=900)}
SPEEDS = {"replica-0": 1234.5}
ADAPTER = AdapterStatus(
    name="math",
    version=3,
    state="live",
    path="/a",
    digest="0123456789abcdef",
    size_bytes=2_500_000,
    replicas=["replica-0", "replica-1"],
    timings=AdapterTimings(copy_s=0.1, sync_s=0.1, load_s=0.2, total_s=0.25, replicas={}),
)


def drawn(shown: RenderableType, width: int, *, colour: bool = False) -> str:
    output = io.StringIO()
    Console(file=output, width=width, force_terminal=colour, color_system="256" if colour else "auto").print(
        shown
    )
    return output.getvalue()


def rows(text: str) -> list[list[str]]:
    return [[cell for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


FENCED = "its engine has died: CUDA error: an illegal memory access was encountered"


def two_replicas() -> RenderableType:
    made = status(3, ["replica-0", "replica-1"], label="step-3", round_id=9)
    lost = replace(made.members[1], state="fenced", admitted=False, version=2, reason=FENCED)
    lease = LeaseStatus(publisher="trainer", remaining_s=28.0)
    return tables.fleet(replace(made, members=[made.members[0], lost], lease=lease), LOADS, SPEEDS)


def test_each_replica_has_its_state_version_and_load() -> None:
    text = drawn(two_replicas(), 160)
    first = next(line for line in text.splitlines() if line.startswith("replica-0")).split()
    assert first == ["replica-0", "serving", "3", "12", "3", "42%", "1234", "0.1", "s"]
    second = next(line for line in text.splitlines() if line.startswith("replica-1"))
    assert second.split()[:7] == ["replica-1", "fenced", "2", "-", "-", "-", "-"] and FENCED in second
    assert "version 3 (step-3), 1 of 1 replicas serve" in text
    assert "round 9, to version 4: staging for 0.5 s" in text
    assert "publisher: trainer, for 28 s more" in text
    assert "rounds: 3 committed, 4 aborted" in text


def test_a_round_has_its_publisher_its_parts_its_outcome_and_the_longest_gap() -> None:
    timings = {
        "replica-0": ReplicaTimings(bytes=2_000_000, gap_s=0.002),
        "replica-1": ReplicaTimings(bytes=2_000_000, gap_s=0.004),
    }
    committed = replace(
        report(1, 3, "step-3"),
        replicas=timings,
        duration_s=125.0,
        publisher="trainer",
        opened_at=time.mktime((2026, 11, 28, 17, 5, 9, 0, 0, -1)),
        parts={"open": 0.5, "send": 0.0, "stage": 123.0, "verify": 1.5},
    )
    aborted = replace(
        report(2, 4, phase="aborted"),
        reason="round 2 aborted: replica-1 did not stage",
        fenced={"replica-1": "x"},
        opened_at=0.0,
    )
    lines = rows(drawn(tables.rounds([committed, aborted]), 200))
    assert [cell.strip() for cell in lines[1]] == [
        *("1", "3", "committed", "11-28 17:05:09", "trainer", "0:02:05", "2.0 MB"),
        *("500 ms", "0:02:03", "1.5 s", "4 ms", "none", "step-3"),
    ]
    assert lines[2][-1].strip() == "replica-1 did not stage; replica-1 fenced: x"


def test_speed_needs_two_answers_of_the_same_engine() -> None:
    def load(at: float, **tokens: int) -> FleetLoad:
        replicas = {
            name: ReplicaLoad(running=0, waiting=0, kv_cache_use=0.0, generated_tokens=count)
            for name, count in tokens.items()
        }
        return FleetLoad(at=at, replicas=replicas, dashboard=None)

    assert tokens_per_s(load(10.0, r0=100, r1=900), load(12.0, r0=150, r1=3, r2=5)) == {"r0": 25.0}


def test_an_adapter_has_its_version_size_and_holders() -> None:
    line = rows(drawn(tables.adapters([ADAPTER]), 120))[1]
    assert [cell.strip() for cell in line] == ["math@3", "live", "2", "2.5 MB", "250 ms", "0123456789ab"]


def test_a_column_that_says_nothing_is_left_out() -> None:
    assert "KV" not in drawn(tables.fleet(status(3, ["replica-0"]), {}, {}), 160)


@pytest.mark.parametrize("empty", [tables.rounds([]), tables.adapters([])])
def test_an_empty_list_says_so(empty: RenderableType) -> None:
    assert drawn(empty, 80).startswith("no ")


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[32m" in drawn(two_replicas(), 80, colour=True)
    assert "\x1b" not in drawn(two_replicas(), 80)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in drawn(two_replicas(), 80, colour=True)


def test_in_a_pipe_no_line_is_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    tables.console().print(two_replicas())
    assert FENCED in capsys.readouterr().out
