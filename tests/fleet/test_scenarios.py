"""The scenario scripts against a fleet on CPUs. `test_launched` runs the one that publishes."""

import json
import os
import subprocess
import sys

import pytest

from app.scenarios.async_inflight import parse, scenario
from tests.fleet.deployed import Fleet
from tests.fleet.talk import ENGINE, ENVIRONMENT

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.long, pytest.mark.timeout(300)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.scenarios.http_publisher", *arguments]
    return subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_transport_that_needs_a_gpu_is_refused_where_there_is_none(fleet: Fleet) -> None:
    said = run("--url", fleet.url, "--transport", "nccl", "--model", str(fleet.checkpoint))
    assert said.returncode == 1
    assert "transport 'nccl' needs a GPU in this process, and there is none" in said.stderr


def test_answers_in_flight_go_on_as_a_fresh_engine_would(fleet: Fleet) -> None:
    options = ["--url", fleet.url, "--requests", "12", "--tokens", "800", "--pause-after", "20"]
    options += ["--engine", json.dumps(ENGINE), "--environment", json.dumps(ENVIRONMENT)]
    outcomes = scenario(parse(options))
    assert [outcome.differs_at for outcome in outcomes] == [None] * 12
    assert all(20 <= outcome.before < 800 == outcome.before + outcome.after for outcome in outcomes)
