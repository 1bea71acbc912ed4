"""Two controllers, one state directory."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deployments.controller.journal import NAME, Journal, JournalError
from deployments.ledger.decisions import Opened


def test_a_second_process_is_refused_and_told_which_one_uses_the_directory(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        with pytest.raises(JournalError, match=rf"another controller uses it \(process {os.getpid()}\)"):
            Journal(tmp_path)
        journal.append([Opened(round_id=1)])
    with Journal(tmp_path) as journal:
        assert journal.recovered == [Opened(round_id=1)]


def test_a_predecessor_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    before = Journal(tmp_path)
    threading.Timer(0.2, before.close).start()
    Journal(tmp_path, lock_wait_s=20).close()


def test_a_journal_that_cannot_be_read_is_not_locked_for_good(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"hello\n")
    with pytest.raises(JournalError, match="expected schema 1"):
        Journal(tmp_path)
    (tmp_path / NAME).unlink()
    Journal(tmp_path).close()


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from deployments.controller.journal import Journal; "
        "journal = Journal(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
        with pytest.raises(JournalError, match=rf"process {holder.pid}\)"):
            Journal(tmp_path)
        holder.kill()
    Journal(tmp_path).close()
