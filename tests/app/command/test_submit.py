"""The RL job gets the address of the fleet and the file of its token, and never a token."""

import subprocess
import sys

import pytest

from app.command.submit import command, relay, submit


def test_a_token_never_is_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "operator-0123456789")
    made = command(["--steps", "2"], url="http://fleet", dashboard="http://d", job_id="j", token_file="t")
    assert "operator-0123456789" not in " ".join(made)
    assert '"SLIPSTREAM_TOKEN_FILE": "/' in " ".join(made)
    assert made[-2:] == ["--steps", "2"]


def test_an_address_with_a_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_URL", "http://x:operator-0123456789@127.0.0.1:1")
    assert submit([]) == 1
    said = capsys.readouterr().err
    assert "SLIPSTREAM_URL carries a token" in said and "operator-0123456789" not in said


@pytest.mark.slow
def test_the_wait_for_a_job_to_start_is_not_silent(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import time; print('Next steps', flush=True); time.sleep(0.6); print('RL job: here', flush=True); "
        "time.sleep(0.6); print('end RL job: x')"
    )
    job = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert job.stdout is not None
    relay(job.stdout, quiet_s=0.2)
    assert job.wait(10) == 0
    before, after = capfd.readouterr().out.split("RL job: here")
    assert "Ray starts the job: 0 s" in before, "said while nothing came"
    assert "Next steps" not in before, "Ray's, for users of its own program"
    assert after.strip() == "end RL job: x", "the job speaks for itself"


def test_what_ray_repeats_after_a_failure_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import time; print('RL job: x', flush=True); time.sleep(0.1); "
        "print('exit code 1, last available logs (truncated):\\nRL job: x', flush=True); "
        "time.sleep(0.1); print('x')"
    )
    job = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert job.stdout is not None
    relay(job.stdout)
    assert job.wait(10) == 0 and capfd.readouterr().out == "RL job: x\nexit code 1\n"


def test_what_ray_says_of_a_job_that_does_not_begin_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    job = subprocess.Popen([sys.executable, "-c", "print('no such address')"], stdout=subprocess.PIPE)
    assert job.stdout is not None
    relay(job.stdout)
    assert job.wait(10) == 0 and capfd.readouterr().out == "no such address\n"
