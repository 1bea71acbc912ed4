import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.command.cli import cli
from app.command.runs import (
    KEPT_RUNS,
    MARK,
    STARTING_S,
    Part,
    keep_logs_only,
    logs_of,
    new_run,
    print_logs,
    runs,
)

WORKER = "worker-{:056x}-01000000-{}.err"


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


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number, actor in enumerate(
        ("ServeController", "ServeReplica:a_b:controller", "ServeReplica:a_b:rollout", "TrainerWorkerActor")
    ):
        text = f":job_id:01\n:actor_name:{actor}\n" + "".join(f"{actor} {line}\n" for line in (1, 2, 3))
        (tmp_path / WORKER.format(number, 90 + number)).write_text(text)
    (tmp_path / WORKER.format(9, 100)).write_text(":job_id:01\n")  # an idle worker
    return tmp_path


def test_each_part_of_a_fleet_is_named(directory: Path) -> None:
    result = CliRunner().invoke(cli, ["logs", "--directory", str(directory), "--last", "1"])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        *("==> controller 91 <==", "ServeReplica:a_b:controller 3"),
        *("==> replica 92 <==", "ServeReplica:a_b:rollout 3"),
        *("==> trainer 93 <==", "TrainerWorkerActor 3"),
    ]
    result = CliRunner().invoke(cli, ["logs", "replica", "--directory", str(directory), "--last", "0"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "The replica has printed nothing: 'log_level' says what is\n"
    result = CliRunner().invoke(cli, ["logs", "router", "--directory", str(directory)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"slipstream: no process of the router has begun in {directory}\n"


def test_followed_logs_have_new_lines_whole_and_new_processes(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = directory / WORKER.format(2, 92), directory / WORKER.format(7, 200)

    def write(path: Path, text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    def ticks() -> Iterator[None]:
        yield
        write(old, "half a ")
        yield
        write(new, ":job_id:01\n:actor_name:ServeReplica:a_b:rollout\nstarts\n")
        write(old, "line\n")
        yield
        yield

    print_logs(directory, Part.REPLICA, 0, ticks())
    assert capsys.readouterr().out.splitlines() == [
        *("==> replica 92 <==", "half a line"),
        *("==> replica 200 <==", "starts"),
    ]


def test_the_newest_run_is_shown_and_the_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newest = started(tmp_path, 1), started(tmp_path, 2)
    (logs_of(newest) / WORKER.format(1, 90)).write_text(":actor_name:ServeReplica:a_b:router\nup\n")
    monkeypatch.setattr("app.command.runs.runs", lambda: runs(tmp_path))
    result = CliRunner().invoke(cli, ["logs"])
    assert (result.exit_code, result.stdout) == (0, "==> router 90 <==\nup\n")
    assert result.stderr.splitlines() == [
        f"==> the run of 2026-01-01 00:00:02: {logs_of(newest)}",
        f"    --directory for the one of 2026-01-01 00:00:01: {logs_of(older)}",
    ]


def test_without_a_run_it_says_where_it_looked(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["logs", "--directory", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert f"expected the logs of `slipstream serve` in {tmp_path}/none, got none" in result.stderr
