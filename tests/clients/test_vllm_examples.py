"""vLLM's RL examples over HTTP, as in its source distribution, with a fleet where they start a server."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.environments import HERE, vllms_examples
from tests.clients.hub_cache import cached, save_tiny_opt
from tests.environment import users_environment

pytestmark = [
    pytest.mark.clients,
    pytest.mark.serve,
    pytest.mark.fleet("examples"),
    pytest.mark.long,
    pytest.mark.timeout(1200),
]
MODEL = "facebook/opt-125m"  # the examples' own; a tiny one has its name here
ROUND = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
PROMPTS = 4


def run_example(name: str, root: Path) -> str:
    """All that an example prints."""
    save_tiny_opt(cached(root / "hf", MODEL), seed=5)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 8000)), "the examples need port 8000, which is taken"
    environment = users_environment(
        **{"HF_HOME": str(root / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
        **{"FLEET_ROOT": str(root), "FLEET_DEVICE": "cpu", "FLEET_PYTHON": sys.executable},
        **{"PATH": f"{HERE / 'programs' / 'as_vllm'}:{os.environ['PATH']}"},
    )
    command = [sys.executable, str(HERE / "programs" / "vllm_example_on_cpu.py")]
    output = root / "output"
    with output.open("w") as stream:
        done = subprocess.run(
            [*command, str(vllms_examples() / name)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=400,
        )
    assert done.returncode == 0, output.read_text()[-4000:]
    return output.read_text()


@pytest.mark.parametrize(
    ("name", "asks"), [("rlhf_http_ipc.py", []), ("rlhf_http_nccl.py", ["/get_world_size"])]
)
def test_an_example_of_vllms_updates_a_fleet(name: str, asks: list[str], tmp_path: Path) -> None:
    printed = run_example(name, tmp_path)
    print(printed)
    calls = re.findall(r"^\[call\] (GET|POST) (\S+) (\d+)$", printed, re.M)
    paths = [path for _, path, _ in calls if path != "/health"]
    assert paths == [*asks, "/init_weight_transfer_engine", "/pause", *ROUND, "/resume"]
    assert {status for _, path, status in calls if path != "/health"} == {"200"}
    before, after = (
        re.findall(r"^Generated text: (.*)$", part, re.M) for part in printed.split("AFTER weight sync")
    )
    assert len(before) == len(after) == PROMPTS
    assert all(one != other for one, other in zip(before, after, strict=True))
    (round_report,) = json.loads((tmp_path / "rounds.json").read_text())["rounds"]
    assert (round_report["phase"], round_report["version"]) == ("committed", 1)
    assert not round_report["fenced"]
