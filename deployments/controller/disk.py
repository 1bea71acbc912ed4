"""The disk that the journal is on: the port, and the operating system's files behind it.

The journal decides what is written and when it must be durable; this module only does it. The simulation in
`tests/simulation` has a disk that loses what was not synced.
"""

import os
from pathlib import Path
from typing import Protocol

from deployments.controller.state_lock import StateLock


class File(Protocol):
    """A file that is open for writing."""

    def size(self) -> int: ...

    def write(self, content: bytes, offset: int) -> None:
        """Not durable yet. Raises OSError."""

    def sync(self) -> None:
        """What was written is durable when it returns. Raises OSError."""

    def allocate(self, offset: int, size_bytes: int) -> None:
        """Reserve space, which reads as zero bytes. Raises OSError if the disk has too little."""

    def is_at(self, path: Path) -> bool:
        """Whether this path still leads to this file."""

    def close(self) -> None: ...


class Lock(Protocol):
    """A directory that this process alone uses."""

    def is_at(self, directory: Path) -> bool:
        """Whether this directory is still the one that is locked."""

    def close(self) -> None: ...


class Disk(Protocol):
    """What the journal needs of a file system."""

    def lock(self, directory: Path, wait_s: float) -> Lock:
        """Make the directory if it is missing, and lock it. Raises JournalError if another process has it."""

    def read(self, path: Path) -> bytes | None:
        """None: there is no such file. Raises OSError."""

    def open(self, path: Path) -> File:
        """An existing file. Raises OSError."""

    def replace(self, path: Path, content: bytes, reserve_bytes: int) -> None:
        """A new file with this content and reserved space takes the old one's place, all or nothing, durably.

        Raises:
            OSError: the old file is as it was.
        """


class LocalFile:
    """A file of the operating system."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b", buffering=0)

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def write(self, content: bytes, offset: int) -> None:
        while content:
            written = os.pwrite(self._file.fileno(), content, offset)
            content, offset = content[written:], offset + written

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def allocate(self, offset: int, size_bytes: int) -> None:
        os.posix_fallocate(self._file.fileno(), offset, size_bytes)

    def is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._file.close()


class LocalDisk:
    """The file system of this host, or one that it has mounted."""

    def lock(self, directory: Path, wait_s: float) -> StateLock:
        directory.mkdir(parents=True, exist_ok=True)
        return StateLock(directory, wait_s=wait_s)

    def read(self, path: Path) -> bytes | None:
        return path.read_bytes() if path.exists() else None

    def open(self, path: Path) -> LocalFile:
        return LocalFile(path)

    def replace(self, path: Path, content: bytes, reserve_bytes: int) -> None:
        aside = path.with_suffix(".new")
        try:
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                os.posix_fallocate(file.fileno(), len(content), reserve_bytes)
                os.fsync(file.fileno())
            aside.rename(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
