"""The journal is written anew while it is open, as it grows."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.controller.disk import LocalDisk
from deployments.controller.journal import NAME, RESERVE_BYTES, REWRITE_BYTES, Journal
from deployments.ledger.compaction import compact
from deployments.ledger.decisions import (
    Admitted,
    Decision,
    Ended,
    Fenced,
    Labelled,
    Opened,
    Participant,
    Promised,
    PromiseEnded,
    decode,
)
from deployments.protocol.publishing import RoundReport
from tests.deployments.controller.full_disk import full_disk
from tests.deployments.controller.test_journal import DECISIONS

ROUNDS, BATCH = 2400, 30  # some MiB more than two rewrites are for


def rounds(first: int, count: int) -> list[Decision]:
    """Of a fleet in which replicas come and go; 10 KB each."""
    return [
        decision
        for number in range(first, first + count)
        for decision in (
            Opened(round_id=number),
            Promised(replica_id="p", incarnation=f"p{number}", version=1, path="v"),
            Admitted(member=Participant(replica_id="p", incarnation=f"p{number}", world_size=1)),
            PromiseEnded(incarnation=f"p{number}"),
            Fenced(replica_id="p", incarnation=f"p{number}", reason="lost", told=number % 5 > 0),
            Ended(
                report=RoundReport(
                    round_id=number,
                    version=1,
                    label=None,
                    epoch=1,
                    phase="aborted",
                    reason="no" * 5000,
                    duration_s=0.5,
                )
            ),
        )
    ]


def batches(count: int = ROUNDS) -> Iterator[list[Decision]]:
    return (rounds(first, BATCH) for first in range(1, count, BATCH))


def text_of(directory: Path) -> bytes:
    return (directory / NAME).read_bytes().split(b"\0", 1)[0]


class Died(BaseException):
    """The process did."""


class FailingDisk(LocalDisk):
    """Its next new files are written as far as `fails` says."""

    def __init__(self) -> None:
        self.fails: str | None = None
        self.asked = 0

    def replace(self, path: Path, content: bytes, reserve_bytes: int) -> None:
        self.asked += 1
        match self.fails:
            case "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            case "dies before":
                path.with_suffix(".new").write_bytes(content[: len(content) // 2])
                raise Died
            case "dies after":
                super().replace(path, content, reserve_bytes)
                raise Died
            case "fails after":  # the sync of the directory
                super().replace(path, content, reserve_bytes)
                raise OSError(errno.ENOSPC, "No space left on device")
            case _:
                super().replace(path, content, reserve_bytes)


@pytest.mark.slow
def test_a_journal_that_stays_open_is_written_anew_as_it_grows(tmp_path: Path) -> None:
    disk, every, longest = FailingDisk(), list(DECISIONS), 0
    with Journal(tmp_path, disk=disk) as journal:
        journal.append(DECISIONS)
        for batch in batches():
            journal.append(batch)
            every += batch
            longest = max(longest, len(text_of(tmp_path)))
            assert journal.has_space or journal.reserve() is None
    assert REWRITE_BYTES // 2 < longest < REWRITE_BYTES + BATCH * 12_000
    assert disk.asked in (3, 4), "as few new files as that takes; the first is of its opening"
    with Journal(tmp_path) as journal:
        assert journal.recovered == compact(every)


def test_what_a_rewritten_journal_has_reserved_is_there_on_a_full_disk(tmp_path: Path) -> None:
    disk, every = FailingDisk(), []
    with Journal(tmp_path, disk=disk) as journal:
        for batch in batches():
            journal.append(batch)
            every += batch
            if disk.asked == 2:
                break
        assert disk.asked == 2 and journal.has_space
        with full_disk(tmp_path):
            journal.append([Labelled(version=1, label="x" * (RESERVE_BYTES - 1000))])
            with pytest.raises(OSError, match="too large"):
                journal.append([Labelled(version=2, label="x" * 1000)])
    with Journal(tmp_path) as journal:
        assert journal.recovered[:-1] == compact(every)


@pytest.mark.slow
def test_a_journal_that_cannot_be_written_anew_goes_on_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, every = FailingDisk(), []
    with Journal(tmp_path, disk=disk) as journal:
        disk.fails = "full"
        for batch in batches():
            journal.append(batch)
            every += batch
    size = len(text_of(tmp_path))
    assert size > 2 * REWRITE_BYTES
    assert 3 <= disk.asked <= 1 + size // REWRITE_BYTES, "it is not tried at every append"
    assert sum("is not written anew" in each.message for each in caplog.records) == disk.asked - 1
    with Journal(tmp_path, disk=disk) as journal:  # still full
        assert journal.recovered == compact(every)
        asked = disk.asked
        journal.append(batch := rounds(ROUNDS + 1, BATCH))
        assert disk.asked == asked
        every += batch
        disk.fails = None
        for batch in batches(1000):
            journal.append(batch)
            every += batch
        assert disk.asked == asked + 1 and len(text_of(tmp_path)) < REWRITE_BYTES
    with Journal(tmp_path) as journal:
        assert journal.recovered == compact(every)


@pytest.mark.parametrize(
    ("fails", "error"), [("dies before", Died), ("dies after", Died), ("fails after", OSError)]
)
def test_nothing_is_lost_if_the_process_ends_while_its_journal_is_written_anew(
    tmp_path: Path, fails: str, error: type[BaseException]
) -> None:
    disk, every = FailingDisk(), []
    journal = Journal(tmp_path, disk=disk)
    disk.fails = fails
    with pytest.raises(error):
        for batch in batches():
            every += batch
            journal.append(batch)
    journal.close()
    assert disk.asked == 2
    with Journal(tmp_path) as journal:
        assert journal.recovered == compact(every)
    assert sorted(each.name for each in tmp_path.iterdir()) == [NAME, "lock"]


def test_whoever_reads_the_old_file_meanwhile_sees_it_whole(tmp_path: Path) -> None:
    disk, every = FailingDisk(), []
    with Journal(tmp_path, disk=disk) as journal, (tmp_path / NAME).open("rb") as reader:
        for batch in batches():
            journal.append(batch)
            every += batch
            if disk.asked == 2:
                break
        _, *lines = reader.read().rstrip(b"\0").splitlines()
        assert [decode(line) for line in lines] == every
        journal.append([Opened(round_id=ROUNDS + 1)])
        assert decode(text_of(tmp_path).splitlines()[-1]) == Opened(round_id=ROUNDS + 1)
