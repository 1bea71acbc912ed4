"""A journal that release 0.1 wrote opens, and says the same.

The file was written before instructions and operations had types; it holds one decision of every kind.
"""

import shutil
from pathlib import Path

from deployments.controller.journal import NAME, Journal
from deployments.ledger.ledger import Ledger
from deployments.protocol.operations import InFlight, Pause, Sleep, SleepTag, WakeUp
from deployments.protocol.reports import Verification

GOLDEN = Path(__file__).with_name("golden") / "decisions-0.1.jsonl"
KINDS = {
    "aborted", "admitted", "committed", "conditioned", "ended", "epoch_changed", "fenced", "finished",
    "labelled", "lease_issued", "opened", "started", "stored",
}  # fmt: skip


def opened(directory: Path) -> Journal:
    shutil.copyfile(GOLDEN, directory / NAME)
    return Journal(directory)


def test_every_kind_of_decision_is_read(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        assert {decision.kind for decision in journal.recovered} == KINDS


def test_a_ledger_recovers_where_that_fleet_was(tmp_path: Path) -> None:
    ledger = Ledger()
    with opened(tmp_path) as journal:
        ledger.recover(journal.recovered, 0.0)
    status = ledger.status(0.0)
    assert (status.committed_version, status.label, status.stored_version, status.epoch) == (2, None, 1, 3)
    assert status.condition == (Pause.name, Sleep.name, WakeUp.name)
    assert status.round is not None and (status.round.round_id, status.round.phase) == (3, "committing")
    assert [(member.replica_id, member.state) for member in status.members] == [("r0", "returning")]
    assert ledger.acquire("trainer", 0.0).token == 3


def test_its_history_and_condition_are_whole(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        ended = [each.report for each in journal.recovered if each.kind == "ended"]
        conditions = [each.condition() for each in journal.recovered if each.kind == "conditioned"]
    assert [(each.phase, each.label, each.verification) for each in ended] == [
        ("committed", "step-1", Verification.NONE),
        ("aborted", "step-1", Verification.NONE),
    ]
    assert ended[0].replicas["r0"].bytes == 10 and ended[0].fenced == {"r1": "verify: failed here"}
    assert conditions == [
        (
            Pause(mode=InFlight.KEEP, clear_cache=False),
            Sleep(level=2, mode=InFlight.ABORT),
            WakeUp(tags=(SleepTag.WEIGHTS,)),
        )
    ]


def test_what_is_appended_now_is_read_again(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        before = journal.recovered
        ledger = Ledger()
        ledger.recover(before, 0.0)
        decisions = ledger.take_decisions()
        journal.append(decisions)
    with Journal(tmp_path) as journal:
        assert decisions[-1] in journal.recovered
