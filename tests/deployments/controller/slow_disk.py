"""A journal whose writes a test can hold up."""

import threading
from collections.abc import Iterable
from pathlib import Path

from deployments.controller.journal import Journal
from deployments.ledger.decisions import Decision

HELD_S = 20.0  # longer than any test waits; it ends a thread that a failed test left


class SlowDisk:
    """Writes wait while `goes` is not set."""

    def __init__(self) -> None:
        self.goes = threading.Event()
        self.goes.set()

    def open(self, directory: Path) -> Journal:
        return _SlowJournal(directory, self.goes)


class _SlowJournal(Journal):
    def __init__(self, directory: Path, goes: threading.Event) -> None:
        super().__init__(directory)
        self._goes = goes

    def append(self, decisions: Iterable[Decision]) -> None:
        self._goes.wait(HELD_S)
        super().append(decisions)
