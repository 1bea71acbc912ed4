"""Layout 3: an outside program drives two replicas over HTTP, with vLLM's own trainer engines and with ours.

The program is the scenario script that a user runs. The replicas' answers after three rounds are those of
an engine that is started from the checkpoint which the program saved.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fleet.gpu_fleets import INVARIANT, fresh_answers, needs_gpus, tiny_fleet
from tests.fleet.talk import PROMPT, complete, on_every_replica
from tests.tiny_models import save_tiny_llama
from trainers.trajectory import VersionSpan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]
ROUNDS = 3
TOKENS = 24


@pytest.mark.parametrize(
    ("layout", "staging", "transport", "port"),
    [
        pytest.param("http_ipc", "none", "ipc", 8351, marks=needs_gpus(1)),
        pytest.param("http_ipc", "device", "slipstream_ipc", 8352, marks=needs_gpus(1)),
        pytest.param("http_nccl", "none", "nccl", 8353, marks=needs_gpus(3)),
        pytest.param("http_nccl", "device", "slipstream_nccl", 8354, marks=needs_gpus(3)),
    ],
)
def test_an_outside_program_drives_two_replicas(
    layout: str, staging: str, transport: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = visible()
    theirs, ours = (devices[:2], devices[2]) if layout == "http_nccl" else (devices[:1], devices[0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(theirs))  # what Ray may give away
    other = save_tiny_llama(tmp_path / "other", seed=11, heads=2, dtype=torch.bfloat16)
    overrides = {"weights": {"staging": staging}, "engine": {"env": INVARIANT, "enforce_eager": True}}
    with tiny_fleet(layout, tmp_path, port, overrides) as (fleet, client, config):
        before = complete(client, max_tokens=TOKENS)
        assert client.get("/get_world_size").json() == {"world_size": 2}
        print(publish(fleet.url, transport, other, tmp_path / "saved", ours))
        answers = on_every_replica(client, max_tokens=TOKENS)
        history = client.get("/fleet/rounds").json()["rounds"]
    assert [entry["phase"] for entry in history] == ["committed"] * ROUNDS
    assert all(len(entry["replicas"]) == 2 and not entry["fenced"] for entry in history)
    (expected,) = fresh_answers(config, tmp_path / "saved", [PROMPT], TOKENS)
    assert expected != before.token_ids, "the rounds must change the answers, or the test shows nothing"
    for answer in answers.values():
        assert answer.token_ids == expected
        assert answer.weight_versions == [VersionSpan(version=ROUNDS, start=0, end=TOKENS)]


def visible() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def publish(url: str, transport: str, model: Path, save: Path, device: str) -> str:
    """Run the scenario script as a user does, on the trainer's GPU; what it printed."""
    command = [sys.executable, "-m", "examples.http_publisher", "--url", url]
    command += ["--transport", transport, "--model", str(model), "--save", str(save)]
    command += ["--rounds", str(ROUNDS), "--noise", "0.05", "--timeout", "90"]
    run = subprocess.run(
        command,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": device},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-3000:]}"
    return run.stdout
