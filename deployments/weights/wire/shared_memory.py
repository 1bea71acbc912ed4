"""Named segments of shared memory on one host. A mapping stays valid after its name is removed."""

import fcntl
import mmap
import os
import re
import uuid
from typing import Self

from deployments.weights.wire.ownership import DIRECTORY, PREFIX, owner

_NAME = re.compile(rf"{PREFIX}-[0-9a-f]{{32}}-[0-9a-f]{{32}}")


def create_mapping(size_bytes: int) -> tuple[str, mmap.mmap]:
    """A new segment of this process, mapped for writing, and its name.

    Raises:
        OSError: not enough shared memory; the message has the sizes.
    """
    name = owner().name(uuid.uuid4().hex)
    descriptor = os.open(DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            # Without this, writing to a full tmpfs kills the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            remove_segment(name)
            free = os.statvfs(DIRECTORY).f_bavail * os.statvfs(DIRECTORY).f_frsize
            raise OSError(
                error.errno,
                f"{size_bytes} bytes do not fit into {DIRECTORY} ({free} bytes free); "
                "lower weights.chunk_bytes, or give the container more shared memory",
            ) from error
        return name, mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def open_mapping(name: str, access: int, size_bytes: int | None = None, *, lock: bool = False) -> mmap.mmap:
    """Map an existing segment.

    Args:
        access: one of mmap's ACCESS_ constants.
        size_bytes: the size that it must have; None accepts any.
        lock: the mapping holds a shared lock; see `segment_pool`.

    Raises:
        ValueError: no such segment, one of another size, or a name that is not of a Slipstream segment.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(f"expected the name of a Slipstream segment, got {name!r}")
    try:
        descriptor = os.open(DIRECTORY / name, os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY)
    except FileNotFoundError as error:
        raise ValueError(f"segment {name!r} does not exist on this host") from error
    try:
        if lock and not _locked(name, descriptor):
            raise ValueError(f"segment {name!r} does not exist on this host any more")
        actual = os.fstat(descriptor).st_size
        if size_bytes is not None and actual != size_bytes:
            raise ValueError(f"segment {name!r} must have {size_bytes} bytes, it has {actual}")
        return mmap.mmap(descriptor, actual, access=access)  # has a duplicate, which keeps the lock
    finally:
        os.close(descriptor)


def _locked(name: str, descriptor: int) -> bool:
    """Lock a segment; False if it has lost its name since it was opened: its sender may fill it again."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.path.samestat(os.stat(DIRECTORY / name), os.fstat(descriptor))
    except (BlockingIOError, FileNotFoundError):
        return False


class SharedWords:
    """A segment of signed 64-bit words that several processes of one host map, write and read.

    Args:
        mapping: for writing; a multiple of 8 bytes.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._words = memoryview(mapping).cast("q")

    @classmethod
    def open(cls, name: str) -> Self:
        """Map the segment `name` of another process.

        Raises:
            ValueError: as `open_mapping`.
        """
        return cls(open_mapping(name, mmap.ACCESS_WRITE))


def remove_segment(name: str) -> None:
    """Remove a segment's name, if it exists; mappings stay valid."""
    (DIRECTORY / name).unlink(missing_ok=True)
