"""Runs of `slipstream serve` on this machine: one directory each. Logs of the last ones are kept."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Short: Ray puts Unix sockets below it, whose paths have at most 107 bytes.
CLUSTER_DIRECTORY = Path("/tmp")
DASHBOARD_PORT = 8265  # Ray's
KEPT_RUNS = 5
STARTING_S = 600.0  # a run of this age may have no processes or logs yet
MARK = "SLIPSTREAM_CLUSTER"  # environment variable of a run's processes
_PREFIX = "slip-"
_MARK_FILE = "mark"
RAY_LOG = "ray-start.log"
_SESSION = "session_latest"  # Ray's link to its directory, whose name starts with the time


def new_run(mark: str, root: Path = CLUSTER_DIRECTORY) -> Path:
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    (directory / _MARK_FILE).write_text(mark)
    for old in runs(root)[KEPT_RUNS:]:
        with suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > STARTING_S and not _is_running(old):
                shutil.rmtree(old, ignore_errors=True)
    return directory


def runs(root: Path = CLUSTER_DIRECTORY) -> list[Path]:
    """This user's runs, newest first."""
    return sorted(filter(_is_run, root.glob(f"{_PREFIX}*")), key=_began, reverse=True)


def _is_run(directory: Path) -> bool:
    """The user may have other directories of such a name."""
    with suppress(FileNotFoundError):  # removed by another one that starts
        return directory.stat().st_uid == os.getuid() and any(
            os.path.lexists(directory / name) for name in (_MARK_FILE, _SESSION, RAY_LOG)
        )
    return False


def logs_of(run: Path) -> Path:
    return run / _SESSION / "logs"


def keep_logs_only(run: Path) -> None:
    for path in [*run.iterdir(), *run.glob("session_*/*")]:
        if path.is_symlink() or path.name == "logs" or path.suffix == ".log":
            continue
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif not path.name.startswith("session_"):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # not empty
        run.rmdir()


def marked_processes(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:  # exited, or another user's
            continue


def _began(run: Path) -> str:
    try:
        return os.readlink(run / _SESSION).rpartition("/")[2]
    except OSError:  # Ray did not start
        return time.strftime("session_%Y-%m-%d_%H-%M-%S", time.localtime(run.stat().st_mtime))


def _is_running(run: Path) -> bool:
    try:
        mark = (run / _MARK_FILE).read_text()
    except OSError:
        return False  # ended: only logs are left
    return any(marked_processes(mark))
