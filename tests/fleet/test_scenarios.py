"""The scenario scripts against a fleet on CPUs: as outside programs, as their users run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from app.scenarios.async_inflight import parse, scenario
from tests.fleet.session_fleet import Fleet
from tests.fleet.talk import ENGINE, ENVIRONMENT, PROMPT, Reference, on_every_replica

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.scenarios.http_publisher", *arguments]
    return subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )


def test_an_outside_program_publishes_a_checkpoint_round_after_round(fleet: Fleet, tmp_path: Path) -> None:
    version, saved = fleet.version(), tmp_path / "saved"
    common = ("--url", fleet.url, "--transport", "shm", "--model", str(fleet.checkpoint))
    said = run(*common, "--rounds", "2", "--noise", "0.3", "--save", str(saved))
    assert said.returncode == 0, said.stderr[-2000:]
    assert f"version {version + 2} in" in said.stdout
    assert said.stdout.count("after: version") == 4
    assert AutoTokenizer.from_pretrained(saved).decode(PROMPT), "a whole checkpoint"
    expected = Reference(saved)(PROMPT, 16)
    assert expected != Reference(fleet.checkpoint)(PROMPT, 16)
    with fleet.client() as client:
        for answer in on_every_replica(client, max_tokens=16).values():
            assert (answer.token_ids, answer.version) == (expected, version + 2)


def test_a_transport_that_needs_a_gpu_is_refused_where_there_is_none(fleet: Fleet) -> None:
    said = run("--url", fleet.url, "--transport", "nccl", "--model", str(fleet.checkpoint))
    assert said.returncode == 1
    assert "transport 'nccl' needs a GPU in this process, and there is none" in said.stderr


def test_answers_in_flight_go_on_as_a_fresh_engine_would(fleet: Fleet) -> None:
    options = ["--url", fleet.url, "--requests", "12", "--tokens", "200", "--pause-after", "20"]
    options += ["--engine", json.dumps(ENGINE), "--environment", json.dumps(ENVIRONMENT)]
    outcomes = scenario(parse(options))
    assert [outcome.differs_at for outcome in outcomes] == [None] * 12
    assert all(20 <= outcome.before < 200 == outcome.before + outcome.after for outcome in outcomes)
