"""Who owns a name in shared memory: the process that holds a lock, which the kernel releases when it ends.

A process id says nothing across containers that share /dev/shm, and numbers are used again. So each process
that creates names has a file there with a lock on it, and its names contain the file's:

    slipstream-<owner>-owner        the locked file: the process, and the namespace that numbered it
    slipstream-<owner>-<...>        segments and directories
    sem.slipstream-<owner>-<...>    semaphores

If the lock can be taken, the owner is gone, however it ended, and whoever takes it removes the names. What
torch and CUDA have left of it has its number alone: it is removed where numbers mean the same, if no process
has this one.
"""

import atexit
import fcntl
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
