"""vLLM's own trainer engines, unchanged, over HTTP into the staging on the device: all or none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.fleet.gpu_fleets import INVARIANT, TinyFleet, fresh_answers, needs_gpus, tiny_fleet
from tests.fleet.losing import members, wait_for_another
from tests.fleet.talk import PROMPT, complete, on_every_replica
from tests.fleet.test_gpu_faults import an_engine
from tests.fleet.test_gpu_http import visible
from tests.fleet.vllm_publisher import HOLDING
from tests.tiny_models import save_tiny_llama
from trainers.trajectory import VersionSpan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]
ROUNDS = 3
TOKENS = 24
CHECKS = ["names", "shapes", "dtypes", "complete", "finite"]
WIRES = [
    pytest.param("ipc", False, 2, 8381, marks=needs_gpus(1)),
    pytest.param("ipc", True, 2, 8382, marks=needs_gpus(1)),
    pytest.param("nccl", False, 1, 8383, marks=needs_gpus(2)),
    pytest.param("nccl", True, 1, 8384, marks=needs_gpus(2)),
    pytest.param("nccl", True, 2, 8385, marks=needs_gpus(3)),
]


@contextmanager
def staged(
    engine: str, replicas: int, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TinyFleet, Path, str]]:
    """A fleet that stages vLLM's wire, other weights, and the GPU that is the trainer's."""
    devices = visible()
    theirs = devices[:replicas] if engine == "nccl" else devices[:1]
    ours = devices[replicas] if engine == "nccl" else devices[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(theirs))  # what Ray may give away
    overrides = {
        "weights": {"staging": "device", "wire": "vllm"},
        "engine": {"env": INVARIANT, "enforce_eager": True, "num_replicas": replicas},
    }
    other = save_tiny_llama(tmp_path / "other", seed=11, heads=2, dtype=torch.bfloat16)
    with tiny_fleet(f"http_{engine}", tmp_path, port, overrides) as made:
        yield made, other, ours


@contextmanager
def publisher(url: str, engine: str, packed: bool, model: Path, device: str, *more: str) -> Iterator[Any]:
    command = [sys.executable, "-m", "tests.fleet.vllm_publisher", "--url", url, "--engine", engine]
    command += ["--model", str(model), *(["--packed"] if packed else []), *more]
    process = subprocess.Popen(
        command,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": device},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def said(process: Any, limit_s: float = 180.0) -> str:
    """All that it prints until it ends."""
    output, _ = process.communicate(timeout=limit_s)
    assert process.returncode == 0, output[-3000:]
    return str(output)


def until_holding(process: Any) -> None:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if HOLDING in line:
            return
    raise AssertionError("".join(lines)[-3000:])


@pytest.mark.parametrize(("engine", "packed", "replicas", "port"), WIRES)
def test_rounds_of_vllms_trainer_end_where_a_fresh_engine_begins(
    engine: str, packed: bool, replicas: int, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with staged(engine, replicas, port, tmp_path, monkeypatch) as ((fleet, client, config), other, device):
        before = complete(client, max_tokens=TOKENS)
        transfer = client.get("/server_info?config_format=json").json()["vllm_config"]
        assert transfer["weight_transfer_config"]["backend"] == engine
        more = ["--rounds", str(ROUNDS), "--save", str(tmp_path / "saved")]
        with publisher(fleet.url, engine, packed, other, device, *more) as process:
            print(said(process))
        answers = on_every_replica(client, replicas, max_tokens=TOKENS)
        history = client.get("/fleet/rounds").json()["rounds"]
    print("last round", history[-1])
    assert [entry["phase"] for entry in history] == ["committed"] * ROUNDS
    assert all(len(entry["replicas"]) == replicas and not entry["fenced"] for entry in history)
    assert [entry["checks"] for entry in history] == [CHECKS + ["replicas"] * (replicas > 1)] * ROUNDS
    assert {"replicas" in entry["checks"] for entry in history} == {replicas > 1}
    assert not any("digests" in entry["checks"] for entry in history)
    assert len({entry["digest"] for entry in history}) == ROUNDS
    (expected,) = fresh_answers(config, tmp_path / "saved", [PROMPT], TOKENS)
    assert expected != before.token_ids, "the rounds must change the answers, or the test shows nothing"
    for answer in answers.values():
        assert answer.token_ids == expected
        assert answer.weight_versions == [VersionSpan(version=ROUNDS, start=0, end=TOKENS)]


@pytest.mark.parametrize(
    ("engine", "packed", "port"),
    [
        pytest.param("ipc", True, 8386, marks=needs_gpus(1)),
        pytest.param("nccl", False, 8387, marks=needs_gpus(2)),
        pytest.param("nccl", True, 8388, marks=needs_gpus(2)),
    ],
)
def test_a_trainer_that_dies_in_the_middle_of_a_round_changes_nothing_and_the_next_one_publishes(
    engine: str, packed: bool, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with staged(engine, 1, port, tmp_path, monkeypatch) as ((fleet, client, _), other, device):
        serving, before = members(client), complete(client, max_tokens=TOKENS)
        with publisher(fleet.url, engine, packed, other, device, "--hold-at", "6") as process:
            until_holding(process)
            during = complete(client, max_tokens=TOKENS)  # decoding continues beside a broadcast that waits
            process.send_signal(signal.SIGKILL)
        assert (during.version, during.token_ids) == (0, before.token_ids)
        begin = time.monotonic()
        until_no_round(client)
        print(f"the round was over {time.monotonic() - begin:.1f} s after the trainer had died")
        after = complete(client, max_tokens=TOKENS)
        assert (after.version, after.token_ids) == (0, before.token_ids)
        assert members(client) == serving, "no replica is fenced for its trainer"
        with publisher(fleet.url, engine, packed, other, device) as process:
            print(said(process))
        assert complete(client, max_tokens=TOKENS).version == 1
        assert members(client) == serving


def until_no_round(client: httpx.Client, limit_s: float = 150.0) -> None:
    deadline = time.monotonic() + limit_s
    while client.get("/fleet").json()["round"] is not None:
        assert time.monotonic() < deadline, "the round of a dead trainer did not end"
        time.sleep(0.2)


@needs_gpus(3)
@pytest.mark.parametrize("packed", [False, True])
def test_a_replica_that_dies_in_mid_broadcast_leaves_the_other_serving_and_joins_the_next_group(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = 8389 + packed
    with staged("nccl", 2, port, tmp_path, monkeypatch) as ((fleet, client, config), other, device):
        serving, before = members(client), complete(client, max_tokens=TOKENS)
        with publisher(fleet.url, "nccl", packed, other, device, "--hold-at", "6") as process:
            until_holding(process)
            an_engine().kill()
            begin = time.monotonic()
            until_no_round(client)
            print(f"the round was over {time.monotonic() - begin:.1f} s after a replica had died")
            survivor = complete(client, max_tokens=TOKENS)
            assert (survivor.version, survivor.token_ids) == (0, before.token_ids)
            refused = client.post("/start_weight_update")
            assert refused.status_code == 409, refused.text
            assert refused.json()["error"]["detail"]["connect_again"] is True
        wait_for_another(client, serving)
        more = ["--save", str(tmp_path / "saved")]
        with publisher(fleet.url, "nccl", packed, other, device, *more) as process:
            print(said(process))
        (expected,) = fresh_answers(config, tmp_path / "saved", [PROMPT], TOKENS)
        for answer in on_every_replica(client, max_tokens=TOKENS).values():
            assert (answer.version, answer.token_ids) == (1, expected)
