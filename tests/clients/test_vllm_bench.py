"""`vllm bench serve` as load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.environments import HERE
from tests.fleet.session_fleet import MODEL, Fleet

pytestmark = [pytest.mark.clients, pytest.mark.serve, pytest.mark.timeout(600)]
PROMPTS = 20


@pytest.mark.long
def test_every_request_is_answered(fleet: Fleet, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "programs" / "vllm_bench.py"), "--backend", "openai"]
    command += ["--base-url", fleet.url, "--model", MODEL]
    command += [
        "--tokenizer",
        str(fleet.checkpoint),
        "--dataset-name",
        "random",
        "--num-prompts",
        str(PROMPTS),
    ]
    command += ["--random-input-len", "64", "--random-output-len", "32", "--ignore-eos"]
    command += ["--save-result", "--result-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    (result,) = (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    assert (result["completed"], result["total_output_tokens"]) == (PROMPTS, 32 * PROMPTS)
