"""Runs of `slipstream serve` on this machine: a directory each, of which the logs stay."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Short: Ray puts Unix sockets below it, whose paths have at most 107 bytes.
CLUSTER_DIRECTORY = Path("/tmp")
DASHBOARD_PORT = 8265  # Ray's
MARK = "SLIPSTREAM_CLUSTER"  # environment variable of a run's processes
RAY_LOG = "ray-start.log"
_SESSION = "session_latest"  # Ray's link to its directory


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
