from pathlib import Path

import pytest

from deployments.controller.journal import NAME, RESERVE_BYTES, Journal, JournalError
from deployments.ledger.compaction import compact
from deployments.ledger.decisions import (
    KEPT_ROUNDS,
    Admitted,
    Committed,
    Decision,
    Ended,
    EpochChanged,
    Fenced,
    Finished,
    Labelled,
    LeaseIssued,
    Opened,
    Participant,
    Started,
    Stored,
)
from deployments.protocol.instructions import CommitMode, KvCache
from deployments.protocol.operations import InFlight
from deployments.protocol.publishing import RoundReport
from tests.deployments.controller.full_disk import full_disk

MEMBER = Participant(replica_id="r", incarnation="i", world_size=2)
COMMITTED = Committed(
    round_id=1,
    version=1,
    label="ü",
    participants=(MEMBER,),
    commit=CommitMode.ROLLING,
    kv_cache=KvCache.KEEP,
    in_flight=InFlight.WAIT,
)
DECISIONS: list[Decision] = [
    Started(generation=1),
    LeaseIssued(token=4, publisher="trainer"),
    EpochChanged(epoch=3),
    Admitted(member=MEMBER),
    Opened(round_id=1),
    COMMITTED,
    Stored(version=1, path="/store/v1", label=None),
    Finished(round_id=1),
    Fenced(replica_id="q", incarnation="j", reason="late", told=False),
]


def test_what_was_appended_is_recovered_in_order(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        assert journal.recovered == []
        journal.append(DECISIONS)
    with Journal(tmp_path) as journal:
        assert journal.recovered == DECISIONS


@pytest.mark.parametrize("after", [b"", bytes(1000), bytes(1000) + b"a later block that was written\n"])
@pytest.mark.parametrize("cut", range(1, 30))
def test_a_truncated_last_line_is_dropped(tmp_path: Path, cut: int, after: bytes) -> None:
    with Journal(tmp_path) as journal:
        journal.append(DECISIONS)
    content = (tmp_path / NAME).read_bytes().rstrip(b"\0")
    (tmp_path / NAME).write_bytes(content[:-cut] + after)
    whole = DECISIONS if cut == 1 else DECISIONS[:-1]  # without its newline alone a line is whole
    with Journal(tmp_path) as journal:
        assert journal.recovered == whole
        journal.append([Opened(round_id=2)])
    with Journal(tmp_path) as journal:
        assert journal.recovered[-1] == Opened(round_id=2)


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append(DECISIONS)
    lines = (tmp_path / NAME).read_bytes().split(b"\n")
    lines[2] = b"nonsense"
    (tmp_path / NAME).write_bytes(b"\n".join(lines))
    with pytest.raises(JournalError, match="line 3: expected a decision, got b'nonsense'"):
        Journal(tmp_path)


@pytest.mark.parametrize("header", [b'{"schema": 99}\n', b"hello\n", b"[]\n", b""])
def test_a_file_of_another_schema_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / NAME).write_bytes(header)
    with pytest.raises(JournalError, match="expected schema 1, found"):
        Journal(tmp_path)
    assert (tmp_path / NAME).read_bytes() == header, "it must be left as it was"


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="expected a directory that can be written"):
        Journal(tmp_path / "file" / "state")


def test_a_full_disk_leaves_the_reserved_space(tmp_path: Path) -> None:
    line = Labelled(version=1, label="x" * 100_000)
    with Journal(tmp_path) as journal, full_disk(tmp_path):
        count = 0
        while (problem := journal.reserve()) is None:
            journal.append([line])
            count += 1
        assert "too large" in problem and count * 100_000 < RESERVE_BYTES
        journal.append([line] * 3)
        with pytest.raises(OSError, match="too large"):
            journal.append([line] * 10)
    with Journal(tmp_path) as journal:
        assert journal.recovered == [line]
        assert journal.reserve() is None


def test_space_is_reserved_again_as_soon_as_there_is_some(tmp_path: Path) -> None:
    line = Labelled(version=1, label="x" * 600_000)
    with Journal(tmp_path) as journal:
        with full_disk(tmp_path):
            journal.append([line])
            assert journal.reserve() is not None
        assert journal.reserve() is None
        with full_disk(tmp_path):
            journal.append([line])


@pytest.mark.parametrize("cut", [0, 1, 2, 20])
def test_on_a_full_disk_a_journal_is_continued_where_it_ended(tmp_path: Path, cut: int) -> None:
    with Journal(tmp_path) as journal:
        journal.append(DECISIONS)
    text = (tmp_path / NAME).read_bytes().rstrip(b"\0")
    (tmp_path / NAME).write_bytes(text[: len(text) - cut] + bytes(5000))  # too small for a new file
    whole = DECISIONS if cut < 2 else DECISIONS[:-1]
    with full_disk(tmp_path), Journal(tmp_path) as journal:
        assert journal.recovered == whole
        journal.append([Opened(round_id=2)])
    assert sorted(each.name for each in tmp_path.iterdir()) == [NAME, "lock"]
    with Journal(tmp_path) as journal:
        assert journal.recovered[-1] == Opened(round_id=2) and COMMITTED in journal.recovered


def test_compaction_keeps_the_last_rounds_of_the_history() -> None:
    reports = [
        RoundReport(
            round_id=number, version=number, label=None, epoch=1, phase="aborted", reason="no", duration_s=0.5
        )
        for number in range(KEPT_ROUNDS + 20)
    ]
    kept = compact([Ended(report=report) for report in reports])
    assert kept == [Ended(report=report) for report in reports[20:]]


def test_compaction_keeps_the_last_of_each_and_forgets_members_that_are_gone() -> None:
    gone = Fenced(replica_id="r", incarnation="i", reason="lost", told=True)
    longer = [*DECISIONS, Opened(round_id=2), EpochChanged(epoch=4), gone]
    kept = compact(longer)
    assert Opened(round_id=1) not in kept and EpochChanged(epoch=3) not in kept
    assert Admitted(member=MEMBER) not in kept and gone in kept and COMMITTED in kept
    assert compact(kept) == kept
