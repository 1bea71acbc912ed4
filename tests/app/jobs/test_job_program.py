"""The job as a user starts it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.command.cli import cli
from app.jobs.grpo import only_job
from tests.fake_http import answering
from tests.free_ports import free_ports

JOB = [sys.executable, "-m", "app.command.cli", "rl"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["@", "no.toml"], "@ no.toml: expected a TOML file that can be read (No such file or directory)"),
        (["--learning-rate", "-1"], "learning_rate: Input should be greater than 0"),
        (["--loss-settings", '{"clip_low": 1}'], "--loss-settings needs --loss"),
        (["--loss", "dapo", "--loss-settings", '{"clip": 1}'], "loss.clip: Extra inputs are not permitted"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(given: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, ["rl", *given])
    assert (done.exit_code, done.stderr, done.stdout) == (1, f"slipstream: {message}\n", "")


@pytest.mark.slow
def test_a_dry_run_shows_the_options_and_tries_the_users_own_reward_where_he_stands(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def length(entry, answer):\n    return len(answer) + entry['base']\n"
    )
    (tmp_path / "problems.jsonl").write_text('{"prompt": "Say it", "base": 0.25}\n')
    (tmp_path / "run.toml").write_text(
        'prompts = "problems.jsonl"\nreward = "my_rewards:length"\nsteps = 7\n'
    )
    (port,) = free_ports(1)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "SLIPSTREAM_URL": f"http://127.0.0.1:{port}"}
    teacher = ["--teacher", "http://name:secret@127.0.0.1:1/v1", "--loss", "jsd"]
    command = [*JOB, "@", "run.toml", "--steps", "9", *teacher, "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert 'teacher = "http://127.0.0.1:1/v1"\n' in done.stdout
    assert "steps = 9\n" in done.stdout and 'reward = "my_rewards:length"\n' in done.stdout
    assert "the first problem: user: Say it\nits reward for an empty answer: 0.25\n" in done.stdout
    assert f"the fleet was not asked: no server answers at http://127.0.0.1:{port}" in done.stdout
    assert {path.name for path in tmp_path.glob("*.*")} == {"my_rewards.py", "problems.jsonl", "run.toml"}


def test_a_fleet_that_is_not_up_is_said_before_anything_is_loaded() -> None:
    with answering(503, {"status": "starting"}) as url:
        done = CliRunner().invoke(cli, ["rl", "--url", url])
    assert (done.exit_code, done.stdout) == (1, "RL job: asking the fleet whether it is up\n")
    assert "GET /health: 503: {" in done.stderr and "start a fleet with `make serve`" in done.stderr


@pytest.mark.slow
def test_output_that_nobody_reads_ends_the_job_with_a_sentence() -> None:
    with subprocess.Popen(
        [*JOB, "--dry-run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stderr is not None
        job.stdout.close()
        assert job.stderr.read() == "slipstream: nobody reads the output, the RL job ends\n"
    assert job.returncode == 1


HOLDER = """
from app.jobs.grpo import only_job
with only_job("http://127.0.0.1:8000/"):
    print(flush=True)
    input()
"""


@pytest.mark.slow
def test_a_second_job_of_a_host_is_refused_until_the_first_has_ended() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline()
        refused = pytest.raises(ValueError, match="another RL job of this host trains this fleet")
        with refused, only_job("http://x:token@127.0.0.1:8000"):
            pass
        with only_job("http://127.0.0.1:8001"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with only_job("http://127.0.0.1:8000"):
        pass
