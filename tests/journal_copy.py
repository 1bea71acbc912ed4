"""The decisions of a controller that runs: its lock keeps readers out, so a copy of its files is read."""

import json
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

from deployments.controller.journal import NAME


class JournalCopy:
    """Notices a decision within a few milliseconds."""

    def __init__(self, state_dir: Path) -> None:
        self._state = state_dir
        self._seen = max(self._read(), default=0)

    def until(self, kind: str, timeout_s: float) -> None:
        """Return as soon as there is another decision of this kind.

        Raises:
            TimeoutError: none was made.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any(found == kind for number, found in self._read().items() if number > self._seen):
                return
        raise TimeoutError(f"the journal has no {kind} after {timeout_s:.0f} s")

    def _read(self) -> dict[int, str]:
        """Kinds by number. Empty where the files changed while they were copied."""
        changed = suppress(FileNotFoundError, sqlite3.DatabaseError)
        with tempfile.TemporaryDirectory(prefix="slipstream-journal-") as copy, changed:
            for name in (NAME, f"{NAME}-wal"):
                shutil.copyfile(self._state / name, Path(copy, name))
            with closing(sqlite3.connect(Path(copy, NAME))) as db:
                rows = db.execute("SELECT number, decision FROM decisions").fetchall()
            return {number: json.loads(decision)["kind"] for number, decision in rows}
        return {}
