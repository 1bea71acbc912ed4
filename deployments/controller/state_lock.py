"""One controller at a time uses a state directory: a lock that ends with its process, however that ends.

Without it a controller that was taken for dead would go on appending to a journal that its successor has
replaced, and both would answer.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from deployments.errors import JournalError

NAME = "lock"
POLL_S = 0.05


class StateLock:
    """Holds the lock from its construction until `close`.

    Args:
        wait_s: how long another holder is waited for: Serve may start a controller while the one before ends.

    Raises:
        JournalError: another process holds it; names that process.
    """

    def __init__(self, directory: Path, *, wait_s: float) -> None:
        # Not to be inherited: a child of a dead controller would hold the lock. Python opens files so.
        self._file = (directory / NAME).open("a+b", buffering=0)
        deadline = time.monotonic() + wait_s
        while not self._acquired():
            if time.monotonic() >= deadline:
                holder = (directory / NAME).read_text(errors="replace").strip()
                self._file.close()
                raise JournalError(
                    f"state directory {directory}: another controller uses it (process "
                    f"{holder or 'unknown'}); stop that fleet, or give this one a 'state_dir' of its own"
                )
            time.sleep(POLL_S)

    def is_at(self, directory: Path) -> bool:
        """Whether this directory is still the one that is locked."""
        try:
            return os.path.samestat(os.stat(directory / NAME), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release it."""
        self._file.close()

    def _acquired(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with suppress(OSError):  # on a full disk the lock is as good without the number
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n".encode())
        return True
