"""Every fault of the list, in every phase of a round, under load."""

import json
import time
from pathlib import Path

import pytest

from tests.chaos.arena import Arena
from tests.chaos.checker import Expected, check
from tests.chaos.faults import IN_THE_WAY, Action, Case, chosen
from tests.chaos.striking import strike
from tests.chaos.timing import Recovery, recovery

LEASE_S = 60.0  # twice the arena's `heartbeat_timeout_s`
LATE_S = 8.0  # what a fault does may be seen only after a while
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.serve,
    pytest.mark.fleet("arena"),
    pytest.mark.long,
    pytest.mark.timeout(500),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in chosen()])
def test_the_fleet_is_never_wrong(arena: Arena, case: Case) -> None:
    begin = time.time()
    struck = strike(arena, case)
    time.sleep(LATE_S)
    whole_at = arena.until_whole_again()
    time.sleep(1.0)  # what was on its way then
    replicas = frozenset(seen for state in arena.recording().since(begin).states for seen in state.serving)
    expected = Expected(
        router_lost=any(target in IN_THE_WAY for target in case.targets),
        killed=replicas if case.action is Action.CUT else frozenset(),
        may_lose=case.may_lose,
        whole_at=whole_at - 10,
    )
    recording = arena.recording().since(begin)
    broken = check(recording, expected)
    measured = recovery(recording, arena, struck)
    note(arena.launched.output.parent / "cases.jsonl", case, measured, len(recording.answers), broken)
    assert not broken, "\n".join(broken[:20])
    # A publisher that is killed gives no round up, nor does vLLM's client whose call is lost.
    held_s = LEASE_S if {"publisher", "router"} & set(case.targets) else 0.0
    assert measured.full_s is not None and measured.in_time(held_s), measured


def note(file: Path, case: Case, measured: Recovery, answers: int, broken: list[str]) -> None:
    """One line a case, for the tables of benchmarks/RESULTS.md."""
    line = {"case": case.name, "answers": answers, "broken": len(broken), **measured.as_dict()}
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)
