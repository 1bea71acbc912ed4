import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from app.client.connection import FleetClient
from app.client.program_options import parse
from app.command import asking, tables
from app.command.cli import cli
from app.command.jobs import Job, JobsError, end, table
from app.command.submit import run_job, submission, submit
from app.jobs.options import JobOptions
from tests.app.command.fake_jobs import FakeJobs
from tests.app.fake_answers import refusal
from tests.free_ports import free_ports

HERE = "http://127.0.0.1:8265"
MADE = submission(parse(JobOptions, ["--steps", "3", "--url", "http://h:1"]), dashboard=HERE)
ID = MADE.job_id


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP as a shell leaves it, whatever this process inherited."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_job_is_started_with_the_fleets_address_and_its_options() -> None:
    assert MADE.entrypoint == f"{sys.executable} -P -m app.jobs --url=http://h:1 --steps=3"
    assert MADE.metadata["options"] == "--url=http://h:1 --steps=3"


def test_a_job_on_this_machine_runs_where_the_user_stands_and_elsewhere_in_what_he_uploads() -> None:
    assert MADE.runtime_env["env_vars"]["SLIPSTREAM_WORKING_DIR"] == os.getcwd()
    away = submission(JobOptions(), dashboard="http://head:8265")
    assert (
        "SLIPSTREAM_WORKING_DIR" not in away.runtime_env["env_vars"] and "working_dir" not in away.runtime_env
    )
    uploaded = submission(JobOptions(working_dir=Path("x")), dashboard=HERE)
    assert uploaded.runtime_env["working_dir"] == str(Path.cwd() / "x")
    assert "SLIPSTREAM_WORKING_DIR" not in uploaded.runtime_env["env_vars"]
    assert "working" not in uploaded.entrypoint


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["@", "no.toml"], "@ no.toml: expected a TOML file that can be read (No such file or directory)"),
        (["--learning-rate", "-1"], "learning_rate: Input should be greater than 0"),
        (["--loss-settings", '{"clip_low": 1}'], "--loss-settings needs --loss"),
        (["--loss", "dapo", "--loss-settings", '{"clip": 1}'], "loss.clip: Extra inputs are not permitted"),
    ],
)
def test_wrong_options_are_refused_before_a_fleet_is_asked(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        submit(given)
    written = capsys.readouterr()
    assert written.err == f"slipstream: {message}\n" and written.out == ""


@pytest.mark.slow
def test_a_dry_run_shows_the_options_and_tries_the_users_own_reward_where_he_stands(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def length(entry, answer):\n    return len(answer) + entry['base']\n"
    )
    (tmp_path / "problems.jsonl").write_text('{"prompt": "Say it", "base": 0.25}\n')
    (tmp_path / "run.toml").write_text(
        'prompts = "problems.jsonl"\nreward = "my_rewards:length"\nsteps = 7\n'
    )
    command = [sys.executable, "-m", "app.command.cli", "rl", "@", "run.toml", "--steps", "9", "--dry-run"]
    (port,) = free_ports(1)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "SLIPSTREAM_URL": f"http://127.0.0.1:{port}"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "steps = 9\n" in done.stdout and 'reward = "my_rewards:length"\n' in done.stdout
    assert "the first problem: user: Say it\nits reward for an empty answer: 0.25\n" in done.stdout
    assert f"the fleet was not asked: no fleet answers at http://127.0.0.1:{port}" in done.stdout
    assert sorted(path.name for path in tmp_path.glob("*.*")) == [
        "my_rewards.py",
        "problems.jsonl",
        "run.toml",
    ]


def test_a_token_never_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "operator-0123456789")
    made = submission(JobOptions(), dashboard=HERE, token_file="t")
    assert "operator-0123456789" not in repr(made)
    assert os.path.isabs(made.runtime_env["env_vars"]["SLIPSTREAM_TOKEN_FILE"])


def test_an_address_with_a_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_URL", "http://x:operator-0123456789@127.0.0.1:1")
    assert submit([]) == 1
    said = capsys.readouterr().err
    assert "address carries a token" in said and "operator-0123456789" not in said


NONE_CAPTURED = "this fleet captures no rollouts: expected the section 'rollouts' in its settings, got none"


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (refusal(400, "invalid_request", NONE_CAPTURED), f"{NONE_CAPTURED} (400)"),
        # Only the job may have the operator's token.
        (refusal(401, "unauthorized", "/rollouts needs a token"), "Ray's dashboard does not answer at"),
    ],
)
def test_a_fleet_that_captures_no_rollouts_gets_no_job(
    refused: httpx.Response, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = {"status": "ok", "serving": 1, "members": 1, "weight_version": 3}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=healthy) if request.url.path == "/health" else refused

    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://fleet")
    monkeypatch.setattr(asking.FleetClient, "connect", lambda *given, **options: FleetClient(http))
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{free_ports(1)[0]}")
    with suppress(typer.Exit):
        assert submit([]) == 1
    assert capsys.readouterr().err.startswith(f"slipstream: {said}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_stops_the_job_and_says_so(number: signal.Signals, hangup: None) -> None:
    jobs, lines = FakeJobs("RL job: loading\n", deaf=1), list[str]()

    def show(line: str) -> None:
        lines.append(line)
        if line == "RL job: loading":
            os.kill(os.getpid(), number)

    assert await run_job(jobs, MADE, show) == 128 + number
    assert jobs.stopped == [ID, ID], "Ray ignored the first request"
    assert lines[-3:] == [f"Stopping RL job {ID} ({number.name})", "the curve", f"RL job {ID} was stopped"]


async def test_a_job_under_nohup_survives_the_terminal(hangup: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    jobs = FakeJobs("RL job: loading\n", ends_as="SUCCEEDED")
    assert await run_job(jobs, MADE, lambda line: os.kill(os.getpid(), signal.SIGHUP)) == 0
    assert jobs.stopped == []


async def test_output_that_nobody_reads_stops_the_job() -> None:
    jobs = FakeJobs("RL job: loading\n")

    def show(line: str) -> None:
        if line.startswith("RL job: "):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await run_job(jobs, MADE, show)
    assert jobs.stopped == [ID]


async def test_a_terminal_that_is_gone_does_not_keep_the_job(hangup: None) -> None:
    jobs, lines = FakeJobs("RL job: loading\n"), list[str]()

    def show(line: str) -> None:
        lines.append(line)
        if line == "RL job: loading":
            os.kill(os.getpid(), signal.SIGHUP)
        elif "RL job: loading" in lines:
            raise OSError("the terminal is gone")

    assert await run_job(jobs, MADE, show) == 129
    assert jobs.stopped == [ID]


async def test_a_job_that_cannot_be_stopped_is_named() -> None:
    jobs = FakeJobs(deaf=1 << 40)
    jobs.add(ID)
    with pytest.raises(JobsError, match=rf"{ID} has not ended within 0\.1 s: it may go on training"):
        await end(jobs, ID, within_s=0.1)


async def test_a_second_job_beside_a_running_one_is_refused_with_its_name() -> None:
    jobs = FakeJobs(ends_as="SUCCEEDED")
    jobs.add("grpo-done", "SUCCEEDED")
    jobs.add("grpo-first", started=1.0)
    with pytest.raises(JobsError, match=r"RL job grpo-first .* `slipstream jobs stop grpo-first` stops it"):
        await run_job(jobs, MADE, print)
    assert ID not in jobs.jobs


async def test_of_two_jobs_submitted_at_once_the_older_one_stays() -> None:
    class Racing(FakeJobs):
        async def submit(self, *arguments: object) -> None:  # type: ignore[override]
            self.add("grpo-other", started=99.0)
            self.add(ID, started=100.0)

    jobs = Racing()
    with pytest.raises(JobsError, match="RL job grpo-other"):
        await run_job(jobs, MADE, print)
    assert jobs.stopped == [ID]


async def test_a_log_that_breaks_off_is_continued_without_repetition() -> None:
    output = "INFO Ray's own line\nRL job: here\nstep 1\nstep 2\nno line break"
    jobs, lines = FakeJobs(output, ends_as="SUCCEEDED", breaks_at=[25, 25, 45]), list[str]()
    assert await run_job(jobs, MADE, lines.append, retry_s=0.01) == 0
    assert lines == [
        f"RL job {ID} is submitted; Ctrl-C stops it",
        f"Ray's dashboard does not answer; RL job {ID} goes on, asking again",
        "RL job: here",
        "step 1",
        f"Ray's dashboard does not answer; RL job {ID} goes on, asking again",
        "step 2",
        "no line break",
    ]


async def test_what_ray_says_of_a_job_that_does_not_begin_is_shown() -> None:
    jobs, lines = FakeJobs("no such program\n", ends_as="FAILED"), list[str]()
    assert await run_job(jobs, MADE, lines.append) == 1
    assert lines[-2:] == ["no such program", "no such thing"]


async def test_the_wait_for_a_job_to_start_is_not_silent() -> None:
    jobs, lines = FakeJobs(), list[str]()
    running = asyncio.ensure_future(run_job(jobs, MADE, lines.append, quiet_s=0.02))
    while len(lines) < 3:
        await asyncio.sleep(0.01)
    assert lines[2] == "Ray starts the job: 0 s"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 143


@pytest.mark.parametrize("command", [["jobs"], ["jobs", "stop"], ["jobs", "stop", "grpo-1"]])
def test_jobs_without_a_fleet_says_so(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{port}")
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 1
    assert done.stderr == (
        f"slipstream: Ray's dashboard does not answer at http://127.0.0.1:{port} (Connection refused): "
        "RAY_API_SERVER_ADDRESS gives its address\n"
    )


def test_jobs_are_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    metadata = {"user": "ann", "options": "--steps=3 --prompts=[x].jsonl"}
    job = Job(job_id="grpo-1", status="RUNNING", message="", started=1.0, metadata=metadata)
    tables.console().print(table([job]))
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["job", "status", "started", "user", "options"]
    assert row.startswith("grpo-1  running") and row.rstrip().endswith("ann   --steps=3 --prompts=[x].jsonl")
