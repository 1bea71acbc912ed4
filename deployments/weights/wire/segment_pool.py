"""Segments of shared memory that a sender fills again in its next round, if nobody maps them any more.

New memory in /dev/shm costs more than what is written to it: the kernel allocates, maps and frees each page.
For 538 MB that took 0.6 s of a core on a virtual machine, and the copy 0.06 s.

    sender     take ── fill ── send the name ── rename, once all receivers have opened it
    receiver   open, lock, map: the lock is shared, and lasts as long as the mapping, however that ends

Whoever still reads a segment, or retains its tensors, has the lock, and the sender takes a new segment
instead. Each name is sent once: a receiver that comes late finds none, and never the next version under an
old name.
"""

import fcntl
import mmap
import os
import threading
import uuid
import weakref
from contextlib import suppress

from deployments.weights.wire.ownership import DIRECTORY, owner
from deployments.weights.wire.shared_memory import create_mapping, open_mapping, remove_segment


class Segment:
    """A segment of this process, mapped for writing.

    Attributes:
        name: under which others can open it.

    Raises:
        OSError: not enough shared memory; the message has the sizes.
    """

    def __init__(self, size_bytes: int) -> None:
        self.name, self.mapping = create_mapping(size_bytes)
        self._descriptor = os.open(DIRECTORY / self.name, os.O_RDONLY | os.O_CLOEXEC)
        self._naming = threading.Lock()
        self._process = os.getpid()

    def is_free(self) -> bool:
        """Whether nobody else maps it. Who opens it by a name of before does not get to map it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def rename(self, former: str) -> None:
        """Give it a name that nobody knows, unless `former` is its name no more. Whoever maps it keeps it."""
        with self._naming, suppress(FileNotFoundError):  # it is closed
            if self.name == former:
                name = owner().name(uuid.uuid4().hex)
                os.rename(DIRECTORY / former, DIRECTORY / name)
                self.name = name

    def close(self) -> None:
        """Remove it; mappings stay valid. Any thread may still rename it. A fork only lets go of it."""
        with self._naming:
            if os.getpid() == self._process:
                remove_segment(self.name)
            os.close(self._descriptor)


class SegmentPool:
    """The segments of a sender's chunks, by the chunk's index. They are removed with it."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        weakref.finalize(self, _close, self._segments).atexit = False  # the owner of the names sees to that

    def take(self, index: int, size_bytes: int) -> Segment:
        """The segment of a chunk, to be filled, under a name that nobody knows yet.

        Raises:
            OSError: not enough shared memory; the message has the sizes.
        """
        kept = self._segments.get(index)
        if kept is not None:
            kept.rename(kept.name)  # a call that was abandoned may still tell it
            if len(kept.mapping) == size_bytes and kept.is_free():
                return kept
            self._segments.pop(index).close()
        self._segments[index] = new = Segment(size_bytes)
        return new

    def close(self) -> None:
        """Remove all of them; mappings stay valid."""
        _close(self._segments)


def _close(segments: dict[int, Segment]) -> None:
    while segments:
        segments.popitem()[1].close()


def open_locked(name: str, size_bytes: int) -> mmap.mmap:
    """Map a segment of a sender, which leaves it alone for as long as it is mapped. What is written to the
    mapping stays in it.

    Raises:
        ValueError: as `open_mapping`.
    """
    # Not ACCESS_READ: torch wants memory that it may write to. Nothing is written, so no page is copied.
    return open_mapping(name, mmap.ACCESS_COPY, size_bytes, lock=True)
