import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from deployments.controller.journal import NAME, RESERVE_BYTES, Journal
from deployments.ledger import decisions
from deployments.protocol.engine_state import InFlight
from deployments.protocol.errors import JournalError
from deployments.protocol.poll import CommitMode, KvCache
from deployments.protocol.publishing import RoundReport
from tests.deployments.ledger.compacted import compact
from tests.full_disk import full_disk, longest_in

MEMBER = decisions.Participant(replica_id="r", incarnation="i", world_size=2)
COMMITTED = decisions.Committed(
    round_id=1,
    version=1,
    label="ü",
    participants=(MEMBER,),
    commit=CommitMode.ROLLING,
    kv_cache=KvCache.KEEP,
    in_flight=InFlight.WAIT,
)


def ended(number: int, reason: str = "no") -> decisions.Ended:
    return decisions.Ended(
        report=RoundReport(
            round_id=number,
            version=number,
            label=None,
            epoch=1,
            phase="aborted",
            reason=reason,
            duration_s=0.5,
        )
    )


DECISIONS: list[decisions.Decision] = [
    decisions.Started(generation=1),
    decisions.LeaseIssued(token=4, publisher="trainer"),
    decisions.Admitted(member=MEMBER, epoch=3),
    decisions.Opened(round_id=1),
    COMMITTED,
    decisions.Stored(version=1, path="/store/v1", label=None),
    ended(1),
    decisions.Fenced(replica_id="q", incarnation="j", reason="late", epoch=4, told=False),
]
GONE = decisions.Fenced(replica_id="r", incarnation="i", reason="lost", epoch=4, told=True)
HOLDER = """
import sys, time
from pathlib import Path
from deployments.controller.journal import Journal
from deployments.ledger.decisions import Opened
journal = Journal(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    journal.append([Opened(round_id=number)])
    print(number, flush=True)
time.sleep(60)
"""


def holder(directory: Path, count: int, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """Another process that appends so many decisions and keeps the journal open."""
    program = [sys.executable, "-c", HOLDER, str(directory), str(count)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=stderr)


def recovered(directory: Path) -> list[decisions.Decision]:
    with closing(Journal(directory)) as journal:
        return journal.recovered


def test_appended_decisions_are_recovered_in_order(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        assert journal.recovered == []
        journal.append(DECISIONS[:3])
        journal.append(DECISIONS[3:])
    assert recovered(tmp_path) == DECISIONS


def test_a_commit_is_synced(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"


# -- a crash ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("reserves", [False, True])  # the log is new, or former frames follow
def test_power_loss_at_any_byte_leaves_the_transactions_before_it(tmp_path: Path, reserves: bool) -> None:
    every = list(DECISIONS)
    lengths, states = [0], [list(DECISIONS)]  # of the log after each transaction, and what it recovers
    with closing(Journal(tmp_path / "state")) as journal:
        journal.append(DECISIONS)
        journal._db.execute("PRAGMA wal_checkpoint")
        if reserves:
            journal.reserve()
        former = log = (tmp_path / "state" / f"{NAME}-wal").read_bytes()
        for batch in (
            [decisions.Opened(round_id=2)],
            [GONE, decisions.Opened(round_id=3)],
            [ended(2, "x" * 9000)],
        ):
            journal.append(batch)
            every += batch
            before, log = log, (tmp_path / "state" / f"{NAME}-wal").read_bytes()
            lengths.append(end_of_change(before, log))
            states.append(compact(every))
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
    edges = {length + offset for length in lengths for offset in (-1, 0, 1)}
    for cut in sorted({*range(0, lengths[-1], 1021), *edges} - {-1}):
        for rest in (b"", bytes(512), os.urandom(512), former[cut:]):
            lost = tmp_path / "lost"
            shutil.copytree(tmp_path / "copy", lost)
            content = log[:cut] + rest
            (lost / f"{NAME}-wal").write_bytes(content)
            whole = sum(content[:length] == log[:length] for length in lengths) - 1
            assert recovered(lost) == states[whole], cut
            shutil.rmtree(lost)


def end_of_change(before: bytes, after: bytes) -> int:
    """Where the last frame ends that is not as it was: a header of 32 bytes, frames of 24 and a page."""
    changed = max(at for at in range(32, len(after)) if before[at : at + 1] != after[at : at + 1])
    return 32 + (changed - 32) // 4120 * 4120 + 4120


@pytest.mark.slow
def test_power_loss_in_a_checkpoint_loses_nothing(tmp_path: Path) -> None:
    """The file has any part of the new pages; the log has all of them until the file is synced."""
    with closing(Journal(tmp_path / "state")) as journal:
        journal.append(DECISIONS)
    before = (tmp_path / "state" / NAME).read_bytes()
    with closing(Journal(tmp_path / "state")) as journal:
        journal.append([*(ended(number, "x" * 300) for number in range(100)), GONE])
        log = (tmp_path / "state" / f"{NAME}-wal").read_bytes()
    after = (tmp_path / "state" / NAME).read_bytes()
    assert after != before
    for cut in range(0, len(after) + 1, 3000):
        lost = tmp_path / f"lost{cut}"
        lost.mkdir()
        (lost / NAME).write_bytes(after[:cut] + before[cut:])
        (lost / f"{NAME}-wal").write_bytes(log)
        assert recovered(lost) == recovered(tmp_path / "state")


@pytest.mark.slow
def test_acknowledged_decisions_survive_sigkill(tmp_path: Path) -> None:
    for count in (1, 40, 300):
        with holder(tmp_path, 10_000) as process:
            assert process.stdout is not None
            told = [process.stdout.readline() for _ in range(count)]
            process.kill()
            rest = process.stdout.read().split()
        (last,) = recovered(tmp_path)
        assert isinstance(last, decisions.Opened) and last.round_id in range(
            int((told + rest)[-1]), int((told + rest)[-1]) + 2
        )


# -- two controllers -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path, hangs: bool) -> None:
    with holder(tmp_path, 1) as process:
        assert process.stdout is not None and process.stdout.readline() == b"0\n"
        if hangs:
            process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(JournalError, match=rf"{NAME}: another controller uses it; stop that fleet"):
            Journal(tmp_path, lock_wait_s=0.3)
        assert 0.3 <= time.monotonic() - began < 10, "a process that hangs is not waited for without end"
        process.kill()
    assert recovered(tmp_path) == [decisions.Opened(round_id=0)]


@pytest.mark.slow
def test_a_second_journal_in_one_process_leaves_the_lock_of_the_first(tmp_path: Path) -> None:
    """Closing a file drops the locks that its process has on it: sqlite knows, and so does the journal."""
    with closing(Journal(tmp_path)) as journal:
        for _ in range(2):
            with pytest.raises(JournalError, match="another controller uses it"):
                Journal(tmp_path)
        with holder(tmp_path, 0, stderr=subprocess.PIPE) as other:
            assert b"another controller uses it" in other.communicate()[1]
        journal.append([decisions.Opened(round_id=1)])
    assert recovered(tmp_path) == [decisions.Opened(round_id=1)]


def test_a_predecessor_that_is_closing_is_waited_for(tmp_path: Path) -> None:
    before = Journal(tmp_path)
    threading.Timer(0.2, before.close).start()
    Journal(tmp_path, lock_wait_s=20).close()


# -- a file that is not ours, or not whole ---------------------------------------------------


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (x)")
    db.close()


def newer(path: Path) -> None:
    Journal(path.parent).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()


def edited(path: Path) -> None:
    with closing(Journal(path.parent)) as journal:
        journal.append(DECISIONS)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE decisions SET decision = 'nonsense' WHERE number = 3")
    db.close()


def truncated(path: Path) -> None:
    with closing(Journal(path.parent)) as journal:
        journal.append(DECISIONS)
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path: Path) -> None:
    with closing(Journal(path.parent)) as journal:
        journal.append(DECISIONS)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(4096))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"hello\n" * 1000), "file is not a database"),
        (lambda path: path.write_bytes(b""), "is empty; restore the fleet's decisions"),
        (foreign, "expected schema 4, found 0; it was written by another version"),
        (newer, "expected schema 4, found 99; it was written by another version"),
        (edited, "row 3: expected a decision, got 'nonsense'"),
        (truncated, "malformed"),
        (overwritten, "damaged|malformed"),
    ],
)
def test_an_unusable_file_is_named_and_not_changed(tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / NAME
    damage(path)
    content = path.read_bytes()
    for _ in range(2):
        with pytest.raises(JournalError, match=rf"{path}.*({message})"):
            Journal(tmp_path)
    assert path.read_bytes() == content
    path.unlink()
    Journal(tmp_path).close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=str(tmp_path / "file")):
        Journal(tmp_path / "file" / "state")


def test_a_log_that_was_left_is_not_applied_to_a_new_file(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.append(DECISIONS)
        log = (tmp_path / f"{NAME}-wal").read_bytes()
    (tmp_path / NAME).unlink()
    (tmp_path / f"{NAME}-wal").write_bytes(log)
    assert recovered(tmp_path) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_not_in_its_place_stays_in_use_and_is_not_written_anew(
    tmp_path: Path, replaced: bool
) -> None:
    place, aside = tmp_path / "place", tmp_path / "aside"
    with closing(Journal(place)) as journal:
        assert journal.reserve() is None
        place.rename(aside)
        if replaced:
            place.mkdir()
            (place / NAME).write_text("another")
        journal.append(DECISIONS)
        assert not journal.has_space and "is not there any more" in str(journal.reserve())
        assert place.exists() is replaced
        if replaced:
            assert (place / NAME).read_text() == "another"
            shutil.rmtree(place)
        aside.rename(place)
        assert journal.reserve() is None and journal.has_space
    assert recovered(place) == DECISIONS


# -- a full disk -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_disk_leaves_the_reserved_space(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        assert journal.reserve() is None
        with full_disk(longest_in(tmp_path)):
            count = 0
            while (problem := journal.reserve()) is None:
                journal.append([ended(count, "x" * 50_000)])
                count += 1
            assert "too large" in problem and count * 50_000 < RESERVE_BYTES
            for number in range(count, count + 8):
                journal.append([ended(number, "x" * 50_000)])
            for number in range(1000):
                journal.append([decisions.Opened(round_id=number)])  # takes no more space
            with pytest.raises(JournalError, match=NAME):
                for number in range(100, 200):
                    journal.append([ended(number, "x" * 50_000)])
    with closing(Journal(tmp_path)) as journal:
        assert len(journal.recovered) > count + 8 and journal.recovered[0] == ended(0, "x" * 50_000)
        assert journal.reserve() is None


def test_space_is_reserved_again_as_soon_as_there_is_some(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        for number in range(3):
            assert journal.reserve() is None
            with full_disk(longest_in(tmp_path)):
                journal.append([ended(number, "x" * 600_000)])
                assert journal.reserve() is not None


def test_a_journal_is_continued_on_a_full_disk(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.append(DECISIONS)
    with full_disk(longest_in(tmp_path)), closing(Journal(tmp_path)) as journal:
        assert journal.recovered == DECISIONS
        journal.append([decisions.Opened(round_id=2)])
    assert decisions.Opened(round_id=2) in recovered(tmp_path)


# -- growth ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_journal_that_stays_open_does_not_grow(tmp_path: Path) -> None:
    every: list[decisions.Decision] = list(DECISIONS)
    with closing(Journal(tmp_path)) as journal:
        journal.append(DECISIONS)
        for first in range(0, 3000, 100):
            batch: list[decisions.Decision] = []
            for number in range(first, first + 100):
                batch += [
                    decisions.Opened(round_id=number),
                    decisions.Admitted(
                        member=decisions.Participant(replica_id="p", incarnation=f"p{number}", world_size=1),
                        epoch=1,
                    ),
                    decisions.Fenced(
                        replica_id="p", incarnation=f"p{number}", reason="lost", epoch=4, told=number % 5 > 0
                    ),
                    ended(number, "no" * 1000),
                ]
            journal.append(batch)
            every += batch
            assert journal.reserve() is None
        sizes = [each.stat().st_size for each in tmp_path.iterdir()]
        assert sum(sizes) < 8 * RESERVE_BYTES < 3000 * 2000 * 2
    assert recovered(tmp_path) == compact(every)
    assert [each.name for each in tmp_path.iterdir()] == [NAME]


def test_compaction_keeps_the_last_rounds_of_the_history() -> None:
    reports = [ended(number) for number in range(decisions.KEPT_ROUNDS + 20)]
    assert compact(reports) == reports[20:]


def test_compaction_keeps_the_last_fences() -> None:
    fences = [
        decisions.Fenced(replica_id="r", incarnation=f"{number}", reason="lost", epoch=4, told=True)
        for number in range(decisions.KEPT_FENCES + 20)
    ]
    assert compact(fences) == fences[20:]


def test_compaction_keeps_the_last_of_each_and_forgets_members_that_are_gone() -> None:
    longer = [*DECISIONS, decisions.Opened(round_id=2), GONE]
    kept = compact(longer)
    assert decisions.Opened(round_id=1) not in kept and decisions.Opened(round_id=2) in kept
    assert decisions.Admitted(member=MEMBER, epoch=3) not in kept and GONE in kept and COMMITTED in kept
    assert compact(kept) == kept
