"""A local disk whose syncs a test can hold up."""

import threading
from pathlib import Path

from deployments.controller.disk import LocalDisk, LocalFile

HELD_S = 20.0  # longer than any test waits; it ends a thread that a failed test left


class SlowFile(LocalFile):
    def __init__(self, path: Path, goes: threading.Event) -> None:
        super().__init__(path)
        self._goes = goes

    def sync(self) -> None:
        self._goes.wait(HELD_S)
        super().sync()


class SlowDisk(LocalDisk):
    """Syncs wait while `goes` is not set."""

    def __init__(self) -> None:
        self.goes = threading.Event()
        self.goes.set()

    def open(self, path: Path) -> SlowFile:
        return SlowFile(path, self.goes)
