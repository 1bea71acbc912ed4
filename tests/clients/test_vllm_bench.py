"""`vllm bench serve` as load: the command of its page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.environments import HERE
from tests.documents import commands_of
from tests.fleet.deployed import MODEL, Fleet

pytestmark = [pytest.mark.clients, pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(600)]
PROMPTS, TOKENS = 20, 32  # the page's
(COMMAND,) = commands_of("docs/clients/vllm.md", ".venv/bin/vllm bench serve ")
PREPARE = "$(.venv/bin/python -m app.settings.models prepare smollm2-135m)"


@pytest.mark.long
def test_every_request_is_answered(fleet: Fleet, tmp_path: Path) -> None:
    # What the page says of a CPU, and what differs between its fleet and this one.
    command = COMMAND
    for page, here in (
        (".venv/bin/vllm bench serve", f"{sys.executable} {HERE / 'programs' / 'vllm_bench.py'}"),
        (PREPARE, str(fleet.checkpoint)),
        ("http://127.0.0.1:8000", fleet.url),
        ("smollm2-135m", MODEL),
    ):
        assert page in command
        command = command.replace(page, here)
    command += f" --ignore-eos --save-result --result-dir {tmp_path}"
    done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    (result,) = (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    assert (result["completed"], result["total_output_tokens"]) == (PROMPTS, TOKENS * PROMPTS)
