import os
import subprocess
import time
from pathlib import Path

from app.command.runs import KEPT_RUNS, MARK, STARTING_S, keep_logs_only, logs_of, new_run, runs


def started(root: Path, second: int, mark: str = "gone") -> Path:
    """A run whose Ray has started at that second."""
    made = new_run(mark, root)
    session = made / f"session_2026-01-01_00-00-{second:02d}_0_1"
    (session / "logs").mkdir(parents=True)
    (session / "sockets").mkdir()
    (session / "sockets" / "raylet").touch()
    (made / "session_latest").symlink_to(session)
    (made / "ray-start.log").write_text("Ray runtime started.")
    begin = time.time() - 2 * STARTING_S
    os.utime(made, (begin, begin))
    return made


def test_the_newest_runs_stay_and_those_that_run(tmp_path: Path) -> None:
    command, pipe = ["sh", "-c", "echo; read _"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, MARK: "runs"}) as process:
        assert process.stdout is not None
        process.stdout.readline()  # /proc shows the new environment once the program runs
        running = started(tmp_path, 0, "runs")
        ended = [started(tmp_path, second) for second in range(1, KEPT_RUNS + 4)]
        process.communicate(b"\n")
    assert runs(tmp_path) == [*reversed(ended[-KEPT_RUNS:]), running]


def test_a_directory_of_the_users_own_is_no_run_whatever_its_name(tmp_path: Path) -> None:
    own = tmp_path / "slip-data"
    own.mkdir()
    (own / "weights").touch()
    os.utime(own, (0, 0))
    for second in range(KEPT_RUNS + 1):
        started(tmp_path, second)
    assert (own / "weights").exists() and own not in runs(tmp_path)


def test_a_run_that_has_just_begun_stays_whatever_it_has(tmp_path: Path) -> None:
    begun = [new_run("no process yet", tmp_path) for _ in range(KEPT_RUNS + 4)]
    assert all(each.exists() for each in begun)


def test_what_a_run_leaves_are_its_logs(tmp_path: Path) -> None:
    run = started(tmp_path, 1)
    (logs_of(run) / "raylet.out").write_text("said")
    keep_logs_only(run)
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert left == {"ray-start.log", "session_2026-01-01_00-00-01_0_1/logs/raylet.out"}
    assert (logs_of(run) / "raylet.out").read_text() == "said"


def test_a_run_without_logs_leaves_nothing(tmp_path: Path) -> None:
    run = new_run("m", tmp_path)
    keep_logs_only(run)
    assert not run.exists()
