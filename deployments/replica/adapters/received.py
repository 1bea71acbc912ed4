"""An adapter that a transport has brought: its two files in this host's memory, until it is loaded.

There is one at most. Its directory is owned by this process and goes with it (see `ownership`).
"""

import shutil
from pathlib import Path

from deployments.weights.wire.shared_memory import DIRECTORY, owner


class ReceivedAdapter:
    """Where it is."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    def place(self, load_id: str) -> Path:
        """Where the files of an adapter are to be written; what was received before is dropped."""
        self.drop()
        self._directory = DIRECTORY / owner().name(f"adapter-{load_id}")
        return self._directory

    def find(self, load_id: str) -> Path | None:
        """The directory of an adapter that has arrived for this load."""
        directory = self._directory
        if directory is None or not directory.name.endswith(f"-adapter-{load_id}"):
            return None
        return directory if directory.is_dir() else None

    def drop(self) -> None:
        """It is not needed any more."""
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
