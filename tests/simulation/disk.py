"""A disk in memory: full, slow or broken, and without what was not synced when its host dies."""

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random

from deployments.errors import JournalError
from tests.simulation.loop import PROCESS, Process


class Inode:
    """What a file holds: in the kernel, and on the medium."""

    def __init__(self, content: bytes = b"", reserved: int = 0) -> None:
        self.content = content
        self.durable = content
        self.reserved = reserved  # its size; what is beyond the content reads as zero bytes


class SimFile:
    """Implements `deployments.controller.disk.File`."""

    def __init__(self, disk: "SimDisk", inode: Inode) -> None:
        self._disk = disk
        self._inode = inode

    def size(self) -> int:
        return max(self._inode.reserved, len(self._inode.content))

    def write(self, content: bytes, offset: int) -> None:
        inode = self._inode
        if self._disk.full and offset + len(content) > self.size():
            raise OSError(errno.ENOSPC, "No space left on device")
        before = inode.content[:offset]
        after = inode.content[offset + len(content) :]
        inode.content = before + bytes(offset - len(before)) + content + after
        if self._disk.dying:
            raise OSError(errno.EIO, "the host is dying")

    def sync(self) -> None:
        if self._disk.broken:
            raise OSError(errno.EIO, "Input/output error")
        self._inode.durable = self._inode.content
        self._disk.synced(self._inode.durable)

    def allocate(self, offset: int, size_bytes: int) -> None:
        if self._disk.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._inode.reserved = offset + size_bytes

    def is_at(self, path: Path) -> bool:
        return self._disk.files.get(path) is self._inode

    def close(self) -> None:
        pass


class SimLock:
    """Implements `deployments.controller.disk.Lock`: it ends with its process."""

    def __init__(self, disk: "SimDisk", holder: Process) -> None:
        self._disk = disk
        self._holder = holder

    def is_at(self, directory: Path) -> bool:
        return self._disk.holder is self._holder

    def close(self) -> None:
        if self._disk.holder is self._holder:
            self._disk.holder = None


class SimDisk:
    """Implements `deployments.controller.disk.Disk` for one state directory.

    Args:
        synced: called with a file's content when it is durable.
    """

    def __init__(self, rng: Random, synced: Callable[[bytes], None]) -> None:
        self.files: dict[Path, Inode] = {}
        self.holder: Process | None = None
        self.full = self.broken = self.dying = False
        self.latency_s: Callable[[], float] = lambda: 0.001
        self.synced = synced
        self._rng = rng

    def lock(self, directory: Path, wait_s: float) -> SimLock:
        if self.holder is not None and self.holder.alive:
            raise JournalError(f"state directory {directory}: another controller uses it ({self.holder})")
        self.holder = PROCESS.get()
        return SimLock(self, self.holder)

    def read(self, path: Path) -> bytes | None:
        inode = self.files.get(path)
        if inode is None:
            return None
        return inode.content + bytes(min(64, max(0, inode.reserved - len(inode.content))))

    def open(self, path: Path) -> SimFile:
        return SimFile(self, self.files[path])

    def replace(self, path: Path, content: bytes, reserve_bytes: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.dying:
            raise OSError(errno.EIO, "the host is dying")
        self.files[path] = Inode(content, len(content) + reserve_bytes)
        self.synced(content)

    def lose_power(self) -> None:
        """What was not synced is gone, or a part of it is there."""
        for inode in self.files.values():
            if inode.content != inode.durable:
                kept = self._rng.randint(len(inode.durable), max(len(inode.durable), len(inode.content)))
                inode.content = inode.durable = inode.content[:kept]
