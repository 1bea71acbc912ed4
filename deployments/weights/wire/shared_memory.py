"""Named segments of shared memory on one host. A mapping outlives the name."""

import mmap
import os
import re
import uuid
from pathlib import Path
from typing import Self

DIRECTORY = Path("/dev/shm")
PREFIX = "slipstream"
_NAME = re.compile(rf"{PREFIX}-(\d+)-[0-9a-f]{{32}}")


def create_mapping(size_bytes: int) -> tuple[str, mmap.mmap]:
    """A new segment, mapped for writing, and its name.

    Raises:
        OSError: there is no room; the message has the numbers.
    """
    name = f"{PREFIX}-{os.getpid()}-{uuid.uuid4().hex}"
    descriptor = os.open(DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            # Without this, writing to a full tmpfs ends the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            remove_segment(name)
            free = os.statvfs(DIRECTORY).f_bavail * os.statvfs(DIRECTORY).f_frsize
            raise OSError(
                error.errno,
                f"a chunk of {size_bytes} bytes does not fit into {DIRECTORY} ({free} bytes free); "
                "lower weights.chunk_bytes, or give the container more shared memory",
            ) from error
        return name, mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def open_mapping(name: str, access: int, size_bytes: int | None = None) -> mmap.mmap:
    """Map an existing segment; it stays after its name is gone.

    Args:
        access: one of mmap's ACCESS_ constants.
        size_bytes: what its size must be; None takes any.

    Raises:
        ValueError: no such segment, or one of another size; names outside our own are refused.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(f"expected the name of a Slipstream segment, got {name!r}")
    try:
        descriptor = os.open(DIRECTORY / name, os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY)
    except FileNotFoundError as error:
        raise ValueError(f"segment {name!r} does not exist on this host") from error
    try:
        actual = os.fstat(descriptor).st_size
        if size_bytes is not None and actual != size_bytes:
            raise ValueError(
                f"segment {name!r} must have {size_bytes} bytes for its tensors, it has {actual}"
            )
        return mmap.mmap(descriptor, actual, access=access)
    finally:
        os.close(descriptor)


class SharedWords:
    """A segment as signed 64-bit words, which processes of one host write and read without a call."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._words = memoryview(mapping).cast("q")

    @classmethod
    def open(cls, name: str) -> Self:
        """Map a segment of another process.

        Raises:
            ValueError: as `open_mapping`.
        """
        return cls(open_mapping(name, mmap.ACCESS_WRITE))


def remove_segment(name: str) -> None:
    (DIRECTORY / name).unlink(missing_ok=True)


def remove_orphans() -> None:
    """Remove segments of publishers that died on this host."""
    for path in DIRECTORY.glob(f"{PREFIX}-*"):
        match = _NAME.fullmatch(path.name)
        if match is not None and not Path(f"/proc/{match.group(1)}").exists():
            path.unlink(missing_ok=True)
