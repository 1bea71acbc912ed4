"""Runs of `slipstream serve` on this machine: one directory each. Logs of the last ones are kept, and
`slipstream logs` prints them."""

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from app.command.shell import ticks

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
    """Make a directory for a run and remove those of old runs."""
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
    """Whether `serve` made this directory: the user may have others of such a name."""
    with suppress(FileNotFoundError):  # removed by another one that starts
        return directory.stat().st_uid == os.getuid() and any(
            os.path.lexists(directory / name) for name in (_MARK_FILE, _SESSION, RAY_LOG)
        )
    return False


def logs_of(run: Path) -> Path:
    return run / _SESSION / "logs"


def keep_logs_only(run: Path) -> None:
    """Remove everything but logs; the whole directory if there are none."""
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
    """Ids of other live processes that inherited this mark."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:  # exited, or another user's
            continue


def began(run: Path) -> str:
    """Date and time."""
    date, _, clock = _began(run).removeprefix("session_")[:19].partition("_")
    return f"{date} {clock.replace('-', ':')}"


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


# -- `slipstream logs` -----------------------------------------------------------------------------

_PERIOD_S = 0.5
_ACTOR = re.compile(rb"^:actor_name:(.*)$", re.MULTILINE)  # head of a Ray worker's output
_HEAD_BYTES = 1000
NOT_FOR_PEOPLE = (":job_id:", ":actor_name:")
_FILES = ("worker-*.err", "worker-*.out")


class Part(StrEnum):
    CONTROLLER = "controller"
    REPLICA = "replica"
    TRAINER = "trainer"
    ROUTER = "router"


_ACTORS = {
    Part.CONTROLLER: re.compile(r"ServeReplica:.*:controller"),
    Part.REPLICA: re.compile(r"ServeReplica:.*:rollout"),
    Part.TRAINER: re.compile(r"ServeReplica:.*:trainer|TrainerWorkerActor"),
    Part.ROUTER: re.compile(r"ServeReplica:.*:router"),
}


def show_logs(part: Part | None, *, directory: Path | None, last: int, follow: bool) -> int:
    """Print the end of each process's output, and with `follow` what is added; returns the exit status.

    Args:
        directory: logs of a run; None: of the newest run on this machine.
    """
    if directory is None:
        kept = runs()
        for number, run in enumerate(kept):
            text = "==> the run" if number == 0 else "    --directory for the one"
            print(f"{text} of {began(run)}: {logs_of(run)}", file=sys.stderr)
        directory = logs_of(kept[0]) if kept else CLUSTER_DIRECTORY / "slip-*"
    if not directory.is_dir():
        print(
            f"slipstream: expected the logs of `slipstream serve` in {directory}, got none; Ray's dashboard "
            "shows those of a cluster that was started otherwise",
            file=sys.stderr,
        )
        return 1
    try:
        if not print_logs(directory, part, last, ticks(follow, _PERIOD_S)):
            print(
                f"slipstream: no process of the {part or 'fleet'} has begun in {directory}", file=sys.stderr
            )
            return 1
    except KeyboardInterrupt:
        pass
    return 0


def print_logs(directory: Path, part: Part | None, last: int, ticks: Iterable[object]) -> bool:
    """Print new lines at each tick, `last` lines per process at the first, also of processes that start
    later; returns whether there was a process."""
    positions: dict[Path, int] = {}
    shown: Path | None = None
    for number, _ in enumerate(ticks):
        for path, title in _outputs(directory, part):
            lines, positions[path] = _new_lines(path, positions.get(path, 0))
            if number == 0:
                lines = lines[max(0, len(lines) - last) :]
            if lines and path != shown:
                print(f"==> {title} <==")
                shown = path
            for line in lines:
                print(line)
        sys.stdout.flush()
    if positions and shown is None:
        print(f"The {part or 'fleet'} has printed nothing: 'log_level' says what is", file=sys.stderr)
    return bool(positions)


def _outputs(directory: Path, part: Part | None) -> Iterator[tuple[Path, str]]:
    """Files and titles, oldest process first."""
    paths = [each for pattern in _FILES for each in directory.glob(pattern)]
    for path in sorted(paths, key=lambda path: _process(path).zfill(10)):
        found = _part_of(path)
        if found is not None and part in (None, found):
            yield path, f"{found} {_process(path)}"


def _process(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def _part_of(path: Path) -> Part | None:
    with path.open("rb") as file:
        actor = _ACTOR.search(file.read(_HEAD_BYTES))
    if actor is None:
        return None
    name = actor[1].decode(errors="replace")
    return next((part for part, pattern in _ACTORS.items() if pattern.fullmatch(name)), None)


def _new_lines(path: Path, position: int) -> tuple[list[str], int]:
    """Complete lines after a byte position, and the next position."""
    with path.open("rb") as file:
        file.seek(position)
        written = file.read()
    complete = written[: written.rfind(b"\n") + 1]
    lines = complete.decode(errors="replace").split("\n")[:-1]
    shown = [line for line in lines if not line.startswith(NOT_FOR_PEOPLE)]
    return shown, position + len(complete)
