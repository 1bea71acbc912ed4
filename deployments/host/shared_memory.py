"""Named shared memory segments of one host. A mapping outlives its name.

A name's owner is the process that holds a file lock, which the kernel releases at exit. Process ids do not
suffice: containers may share /dev/shm, and ids are reused.

    slipstream-<owner>-owner        the locked file: process id and its namespace
    slipstream-<owner>-<...>        segments and directories
    sem.slipstream-<owner>-<...>    semaphores

A process that gets the lock removes the names of the dead owner. Files of torch and CUDA contain only the
process id: they are removed in the same namespace if no process has that id.
"""

import atexit
import fcntl
import mmap
import os
import re
import select
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

DIRECTORY = Path("/dev/shm")
PREFIX = "slipstream"
_OWNER_FILE = re.compile(rf"{PREFIX}-([0-9a-f]{{32}})-owner")
_PROCESS = re.compile(r"(?P<namespace>\S+) (?P<pid>\d{1,7})")


class Owner:
    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        # Locked before it has a name: no process may find it unlocked.
        self._descriptor = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        with suppress(OSError):  # no memory left; the name needs none
            os.write(self._descriptor, f"{_namespace()} {os.getpid()}".encode())
        # The unused directory descriptor makes Python follow the symbolic link.
        source = f"/proc/self/fd/{self._descriptor}"
        os.link(source, DIRECTORY / self.name("owner"), src_dir_fd=self._descriptor)

    def name(self, suffix: str) -> str:
        return f"{PREFIX}-{self.id}-{suffix}"

    def release(self) -> None:
        _remove(self.id)
        os.close(self._descriptor)


_own: Owner | None = None


def owner() -> Owner:
    global _own
    if _own is None:
        _own = Owner()
        atexit.register(_disown_at_exit, os.getpid())
    return _own


def disown() -> None:
    global _own
    if _own is not None:
        _own.release()
        _own = None


def _disown_at_exit(process_id: int) -> None:
    if os.getpid() == process_id:  # a fork does not own its parent's names
        disown()


def remove_orphans() -> None:
    """As far as this user may."""
    for path in DIRECTORY.glob(f"{PREFIX}-*-owner"):
        match = _OWNER_FILE.fullmatch(path.name)
        if match is None:
            continue
        with suppress(OSError):  # another user's, already removed, or locked by a live owner
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
        elif path != owner_file:  # last: if interrupted, the next process continues
            path.unlink(missing_ok=True)
    if _remove_what_libraries_left(owner_file):
        owner_file.unlink(missing_ok=True)


def _remove_what_libraries_left(owner_file: Path) -> bool:
    """Remove a killed process's CUDA IPC files: torch's `torch_PID_*` and the driver's `cuda.shm.USER.PID.*`
    (hexadecimal). Returns False if it has not exited."""
    try:
        match = _PROCESS.fullmatch(owner_file.read_text(errors="replace"))
    except OSError:
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
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        return not select.select([descriptor], [], [], 0)[0]  # readable after exit
    finally:
        os.close(descriptor)


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


_NAME = re.compile(rf"{PREFIX}-[0-9a-f]{{32}}-[0-9a-f]{{32}}")


def create_mapping(size_bytes: int) -> tuple[str, mmap.mmap]:
    """Raises OSError, with the sizes."""
    name = owner().name(uuid.uuid4().hex)
    descriptor = os.open(DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            # Without it, writing to a full tmpfs kills the process with SIGBUS.
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


def open_mapping(name: str, access: int, size_bytes: int | None = None) -> mmap.mmap:
    """`access` is one of mmap's ACCESS_ constants. Raises ValueError."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(f"expected the name of a Slipstream segment, got {name!r}")
    try:
        descriptor = os.open(DIRECTORY / name, os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY)
    except FileNotFoundError as error:
        raise ValueError(f"segment {name!r} does not exist on this host") from error
    try:
        actual = os.fstat(descriptor).st_size
        if size_bytes is not None and actual != size_bytes:
            raise ValueError(f"segment {name!r} must have {size_bytes} bytes, it has {actual}")
        return mmap.mmap(descriptor, actual, access=access)
    finally:
        os.close(descriptor)


def remove_segment(name: str) -> None:
    (DIRECTORY / name).unlink(missing_ok=True)
