"""The runs of `slipstream serve` here, a directory for each; the logs of the last ones are kept."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Short: Ray puts Unix sockets below it, whose paths have at most 107 bytes.
CLUSTER_DIRECTORY = Path("/tmp")
KEPT_RUNS = 5
MARK = "SLIPSTREAM_CLUSTER"  # in the environment of a run's processes
_PREFIX = "slip-"
_MARK_FILE = "mark"
_SESSION = "session_latest"  # Ray's link to its directory, whose name begins with the time


def new_run(mark: str, root: Path = CLUSTER_DIRECTORY) -> Path:
    """A directory for a run. Those of old runs that have ended are removed."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    (directory / _MARK_FILE).write_text(mark)
    for old in runs(root)[KEPT_RUNS:]:
        if not _is_running(old):
            shutil.rmtree(old, ignore_errors=True)
    return directory


def runs(root: Path = CLUSTER_DIRECTORY) -> list[Path]:
    """This user's runs, the newest first."""
    found = [each for each in root.glob(f"{_PREFIX}*") if each.is_dir() and each.stat().st_uid == os.getuid()]
    return sorted(found, key=_began, reverse=True)


def logs_of(run: Path) -> Path:
    return run / _SESSION / "logs"


def keep_logs_only(run: Path) -> None:
    """Remove Ray's sockets and other files of a run that has ended; all of it if it has no logs."""
    for path in [*run.iterdir(), *run.glob("session_*/*")]:
        if path.is_symlink() or path.name == "logs" or path.suffix == ".log":
            continue
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif not path.name.startswith("session_"):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # it is not empty
        run.rmdir()


def marked_processes(mark: str) -> Iterator[int]:
    """Ids of the other live processes that inherited this mark."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:  # it has exited, or belongs to another user
            continue


def _began(run: Path) -> str:
    try:
        return os.readlink(run / _SESSION).rpartition("/")[2]
    except OSError:  # Ray has not started
        return time.strftime("session_%Y-%m-%d_%H-%M-%S", time.localtime(run.stat().st_mtime))


def _is_running(run: Path) -> bool:
    try:
        mark = (run / _MARK_FILE).read_text()
    except OSError:
        return False  # it has ended: only its logs are left
    return any(marked_processes(mark))
