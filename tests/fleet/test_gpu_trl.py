"""TRL's GRPOTrainer in server mode against a fleet: its own NCCL path, into the staging on the device.

Where TRL is installed beside vLLM; it is no dependency of ours.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from deployments.trainer.fleet_connection import free_port
from tests.fleet.gpu_fleets import INVARIANT, fresh_answers, needs_gpus, tiny_fleet
from tests.fleet.talk import PROMPT, complete, on_every_replica
from tests.fleet.test_gpu_http import visible
from trainers.trajectory import VersionSpan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(420),
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
]
PROGRAM = Path(__file__).parents[1] / "clients" / "programs" / "trl_grpo_server.py"
STEPS = 20
TOKENS = 24


@pytest.mark.parametrize(
    ("replicas", "port"),
    [
        pytest.param(1, 8391, marks=needs_gpus(2), id="one"),
        pytest.param(2, 8392, marks=needs_gpus(3), id="two"),
    ],
)
def test_grpo_in_server_mode_updates_the_fleet_in_each_step(
    replicas: int, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *theirs, ours = visible()[: replicas + 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(theirs))  # what Ray may give away
    overrides = {
        "weights": {"staging": "device", "wire": "vllm"},
        "engine": {
            **{"env": INVARIANT, "enforce_eager": True, "num_replicas": replicas},
            "extra": {"logprobs_mode": "processed_logprobs", "max_logprobs": -1},
        },
    }
    with tiny_fleet("http_nccl", tmp_path, port, overrides) as (fleet, client, config):
        before = complete(client, max_tokens=TOKENS)
        options = {
            **{"url": fleet.url, "checkpoint": config.model, "saved": str(tmp_path / "saved")},
            **{"output": str(tmp_path / "output"), "steps": STEPS, "group_port": free_port()},
        }
        done = subprocess.run(
            [sys.executable, str(PROGRAM), json.dumps(options)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ours},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        answers = on_every_replica(client, replicas, max_tokens=TOKENS)
        history = client.get("/fleet/rounds").json()["rounds"]
    print(found, "last round", history[-1])
    rounds = len(found["sync_s"])
    assert rounds >= STEPS
    assert [entry["phase"] for entry in history] == ["committed"] * rounds
    assert all(len(entry["replicas"]) == replicas and not entry["fenced"] for entry in history)
    (expected,) = fresh_answers(config, tmp_path / "saved", [PROMPT], TOKENS)
    assert expected != before.token_ids
    for answer in answers.values():
        assert answer.token_ids == expected
        assert answer.weight_versions == [VersionSpan(version=rounds, start=0, end=TOKENS)]
    first, last = found["rewards"][:5], found["rewards"][-5:]
    assert sum(last) / 5 > sum(first) / 5 + 0.03  # from one half; the noise of a mean is 0.01
