"""Named segments of shared memory on one host. A mapping stays valid after its name is removed."""

import atexit
import fcntl
import mmap
import os
import re
import select
import shutil
import threading
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Self

# Who owns a name in shared memory: the process that holds a lock, which the kernel releases when it ends.
#
# A process id says nothing across containers that share /dev/shm, and numbers are used again. So each process
# that creates names has a file there with a lock on it, and its names contain the file's:
#
#     slipstream-<owner>-owner        the locked file: the process, and the namespace that numbered it
#     slipstream-<owner>-<...>        segments and directories
#     sem.slipstream-<owner>-<...>    semaphores
#
# If the lock can be taken, the owner is gone, however it ended, and whoever takes it removes the names. What
# torch and CUDA have left of it has its number alone: it is removed where numbers mean the same, if no
# process has this one.

DIRECTORY = Path("/dev/shm")
PREFIX = "slipstream"
_OWNER_FILE = re.compile(rf"{PREFIX}-([0-9a-f]{{32}})-owner")
_PROCESS = re.compile(r"(?P<namespace>\S+) (?P<pid>\d{1,7})")


class Owner:
    """A locked file. The lock ends with the process, and with the last of its forks."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        # Without a name until it is locked: nobody may find it in between.
        self._descriptor = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        with suppress(OSError):  # the memory is full: the name alone takes none
            os.write(self._descriptor, f"{_namespace()} {os.getpid()}".encode())
        # With a directory's descriptor, which an absolute path ignores, Python follows the symbolic link.
        source = f"/proc/self/fd/{self._descriptor}"
        os.link(source, DIRECTORY / self.name("owner"), src_dir_fd=self._descriptor)

    def name(self, suffix: str) -> str:
        """A name of this owner."""
        return f"{PREFIX}-{self.id}-{suffix}"

    def release(self) -> None:
        """Remove everything that has a name of this owner, and the owner."""
        _remove(self.id)
        os.close(self._descriptor)


_own: Owner | None = None


def owner() -> Owner:
    """This process's."""
    global _own
    if _own is None:
        _own = Owner()
        atexit.register(_disown_at_exit, os.getpid())
    return _own


def disown() -> None:
    """Remove everything that this process owns; mappings stay valid."""
    global _own
    if _own is not None:
        _own.release()
        _own = None


def _disown_at_exit(process_id: int) -> None:
    if os.getpid() == process_id:  # a fork has the same names, and they are not its own
        disown()


def remove_orphans() -> None:
    """Remove everything whose owner is gone, and that this user may remove."""
    for path in DIRECTORY.glob(f"{PREFIX}-*-owner"):
        match = _OWNER_FILE.fullmatch(path.name)
        if match is None:
            continue
        with suppress(OSError):  # another user's, removed meanwhile, or locked: then its owner lives
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(match.group(1))
            finally:
                os.close(descriptor)


def _remove(owner_id: str) -> None:
    names = f"{PREFIX}-{owner_id}-"
    owner_file = DIRECTORY / f"{names}owner"
    for path in (*DIRECTORY.glob(f"{names}*"), *DIRECTORY.glob(f"sem.{names}*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path != owner_file:  # last: if this process ends here, the next one goes on
            path.unlink(missing_ok=True)
    if _remove_what_libraries_left(owner_file):
        owner_file.unlink(missing_ok=True)


def _remove_what_libraries_left(owner_file: Path) -> bool:
    """Of CUDA IPC: torch's counts of users (`torch_PID_*`), which it takes away unless it is killed, and the
    driver's (`cuda.shm.USER.PID.*`, hexadecimal), which stay if Python's exit is all that a process has had.

    False if there are some and the process has not ended: the next one goes on.
    """
    try:
        match = _PROCESS.fullmatch(owner_file.read_text(errors="replace"))
    except OSError:  # somebody has removed it
        return True
    if match is None or match["namespace"] != _namespace():
        return True
    pid = int(match["pid"])
    names = [*DIRECTORY.glob(f"torch_{pid}_*"), *DIRECTORY.glob(f"cuda.shm.*.{pid:x}.*")]
    if names and _runs(pid):
        return False
    for path in names:
        path.unlink(missing_ok=True)
    return True


def _runs(pid: int) -> bool:
    """Whether a process has this number, other than one that is dead and not yet waited for."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # nobody can say
        return True
    try:
        return not select.select([descriptor], [], [], 0)[0]  # readable once the process has ended
    finally:
        os.close(descriptor)


def _namespace() -> str:
    """Of process ids, such as "pid:[4026531836]"."""
    return os.readlink("/proc/self/ns/pid")


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


# Segments of shared memory that a sender fills again in its next round, if nobody maps them any more.
#
# New memory in /dev/shm costs more than what is written to it: the kernel allocates, maps and frees each
# page. For 538 MB that took 0.6 s of a core on a virtual machine, and the copy 0.06 s.
#
#     sender     take ── fill ── send the name ── rename, once all receivers have opened it
#     receiver   open, lock, map: the lock is shared, and lasts as long as the mapping, however that ends
#
# Whoever still reads a segment, or retains its tensors, has the lock, and the sender takes a new segment
# instead. Each name is sent once: a receiver that comes late finds none, and never the next version under an
# old name.


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
