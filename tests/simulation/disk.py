"""A state directory in memory: full, slow or broken, and without what was not synced when its host dies."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

from deployments.controller.journal import Journal
from deployments.ledger.decisions import Decision, decode, encode
from deployments.protocol.errors import JournalError
from tests.deployments.ledger.compacted import compact
from tests.simulation.loop import PROCESS, Process


class SimDisk:
    """Holds the decisions of one fleet.

    Args:
        synced: called with decisions when they are durable.
    """

    def __init__(self, rng: Random, synced: Callable[[Sequence[Decision]], None]) -> None:
        self.durable: list[Decision] = []
        self.unsynced: list[Decision] = []  # one transaction, all of it or nothing
        self.holder: Process | None = None
        self.full = self.broken = self.dying = False
        self.latency_s: Callable[[], float] = lambda: 0.001
        self.synced = synced
        self._rng = rng

    def open(self, directory: Path) -> "SimJournal":
        if self.holder is not None and self.holder.alive:
            raise JournalError(f"{directory}: another controller uses it ({self.holder})")
        self.holder = PROCESS.get()
        return SimJournal(self, self.holder)

    def write(self, decisions: Iterable[Decision]) -> None:
        """One transaction. Raises JournalError."""
        self.unsynced += [decode(encode(each)) for each in decisions]
        if self.dying or self.broken:
            raise JournalError("the host is dying" if self.dying else "disk I/O error")
        new, self.unsynced = self.unsynced, []
        self.durable = compact([*self.durable, *new])
        self.synced(new)

    def lose_power(self) -> None:
        """What was not synced is gone, or is there."""
        if self._rng.random() < 0.5:
            self.durable = compact([*self.durable, *self.unsynced])
            self.synced(self.unsynced)
        self.unsynced = []


class SimJournal(Journal):
    """What a process has of it. Its lock ends with the process."""

    def __init__(self, disk: SimDisk, holder: Process) -> None:
        self._disk = disk
        self._holder = holder
        self.recovered = compact([*disk.durable, *disk.unsynced])
        self.has_space = not disk.full

    def append(self, decisions: Iterable[Decision]) -> None:
        if self._disk.holder is not self._holder:
            raise JournalError("it is closed")
        self._disk.write(decisions)
        self.has_space = not self._disk.full

    def reserve(self) -> str | None:
        self.has_space = not self._disk.full
        return "No space left on device" if self._disk.full else None

    def close(self) -> None:
        if self._disk.holder is self._holder:
            self._disk.holder = None
