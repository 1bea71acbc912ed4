"""`slipstream logs`: output of a run's processes."""

import re
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

from app.client.run_display import EVENT
from app.command.runs import CLUSTER_DIRECTORY, began, logs_of, runs
from app.command.shell import ticks

PERIOD_S = 0.5
_ACTOR = re.compile(rb"^:actor_name:(.*)$", re.MULTILINE)  # head of a Ray worker's output
_HEAD_BYTES = 1000
_JOB = "job-driver-"
NOT_FOR_PEOPLE = (":job_id:", ":actor_name:", EVENT)
_FILES = ("worker-*.err", "worker-*.out", f"{_JOB}*.log")


class Part(StrEnum):
    CONTROLLER = "controller"
    REPLICA = "replica"
    TRAINER = "trainer"
    ROUTER = "router"
    JOB = "job"


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
        if not print_logs(directory, part, last, ticks(follow, PERIOD_S)):
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
    return path.stem.removeprefix(_JOB) if path.name.startswith(_JOB) else path.stem.rpartition("-")[2]


def _part_of(path: Path) -> Part | None:
    if path.name.startswith(_JOB):
        return Part.JOB
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
