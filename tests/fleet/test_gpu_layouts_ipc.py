"""Transport `ipc`: GPUs that an FSDP2 trainer shares with its fleet, and replicas on GPUs of their own.

The fleets that share are dense replicas, and one of spread experts. Their layouts are for four GPUs; with two
the same code runs with two ranks.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from app.client import calls
from app.client.connection import FleetClient
from tests.fleet.gpu_fleets import (
    INVARIANT,
    check_against_a_fresh_engine,
    configuration,
    fresh_answers,
    needs_gpus,
    running,
)
from tests.fleet.talk import PROMPT, complete, on_every_replica, sampled, succeeded, train_and_publish
from tests.tiny_models import save_tiny_experts, save_tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]
TOKENS = 24
PROMPTS = [PROMPT, [40, 41, 42], list(range(10, 30))]


def publish(client: httpx.Client) -> dict[str, Any]:
    answer = client.post("/train/publish", json={})
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    return report


@pytest.mark.parametrize(
    ("count", "port"),
    [pytest.param(2, 8362, marks=needs_gpus(2)), pytest.param(4, 8371, marks=needs_gpus(4))],
    ids=["two", "four"],
)
def test_replicas_each_beside_a_rank_end_where_a_fresh_engine_begins(
    tmp_path: Path, count: int, port: int
) -> None:
    checkpoint = save_tiny_llama(tmp_path / "model", seed=1, heads=2, dtype=torch.bfloat16)
    overrides = {"engine": {"env": INVARIANT, "num_replicas": count}, "trainer": {"world_size": count}}
    config = configuration("ipc_fsdp_dense", checkpoint, tmp_path / "state", overrides)
    with running(config, checkpoint, port) as fleet, fleet.client() as client:
        before = on_every_replica(client, count=count, max_tokens=TOKENS)
        assert len(publish(client)["replicas"]) == count
        for _ in range(2):
            version = train_and_publish(client)
        reached = check_against_a_fresh_engine(client, config, tmp_path / "saved", before, TOKENS)
        assert reached == version == 3


@pytest.mark.parametrize(
    ("count", "port"),
    [pytest.param(1, 8379, marks=needs_gpus(2)), pytest.param(2, 8380, marks=needs_gpus(3))],
    ids=["one", "two"],
)
def test_replicas_on_other_gpus_end_where_a_fresh_engine_begins(
    tmp_path: Path, count: int, port: int
) -> None:
    checkpoint = save_tiny_llama(tmp_path / "model", seed=1, heads=2, dtype=torch.bfloat16)
    overrides = {
        "engine": {"env": INVARIANT, "enforce_eager": True, "num_replicas": count},
        "weights": {"transport": "ipc", "chunk_bytes": 1 << 16},  # several chunks
    }
    config = configuration("nccl_two_replicas", checkpoint, tmp_path / "state", overrides)
    with running(config, checkpoint, port) as fleet, fleet.client() as client:
        before = on_every_replica(client, count=count, max_tokens=TOKENS)
        for _ in range(3):
            version = train_and_publish(client)
        reached = check_against_a_fresh_engine(client, config, tmp_path / "saved", before, TOKENS)
        assert reached == version == 3


@pytest.mark.parametrize(
    ("count", "port"),
    [pytest.param(2, 8363, marks=needs_gpus(2)), pytest.param(4, 8372, marks=needs_gpus(4))],
    ids=["two", "four"],
)
def test_spread_experts_sleep_wake_update_and_end_where_a_fresh_engine_begins(
    tmp_path: Path, count: int, port: int
) -> None:
    checkpoint = save_tiny_experts(tmp_path / "model", seed=1, dtype=torch.bfloat16)
    overrides = {
        "engine": {"enforce_eager": True, "data_parallel_size": count},
        "weights": {"chunk_bytes": 1 << 20},
        "trainer": {"world_size": count},
    }
    config = configuration("ipc_fsdp_ep", checkpoint, tmp_path / "state", overrides)
    with running(config, checkpoint, port) as fleet, fleet.client() as client:
        assert client.get("/get_world_size").json() == {"world_size": count}
        before = [complete(client, prompt, TOKENS).token_ids for prompt in PROMPTS]
        publish(client)
        train_and_publish(client)
        asleep_round(client)
        version = train_and_publish(client, sign=-1.0)
        print("last round", client.get("/fleet/rounds").json()["rounds"][-1])
        saved = Path(client.post("/train/save", json={"path": str(tmp_path / "saved")}).json()["path"])
        after = [complete(client, prompt, TOKENS) for prompt in PROMPTS]
        assert {answer.version for answer in after} == {version} == {4}
        expected = fresh_answers(config, saved, PROMPTS, TOKENS)
        assert [answer.token_ids for answer in after] == expected
        assert all(old != new for old, new in zip(before, expected, strict=True))


def asleep_round(client: httpx.Client) -> None:
    """The engine gives its memory to the trainer's step, and takes it back in two parts."""
    trajectories = [
        sampled(client, index).trajectory(PROMPT, advantage=1.0 if index % 2 else -1.0) for index in range(4)
    ]
    succeeded(client.post("/sleep", params={"level": 1}))
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    FleetClient(client).send(calls.step(trajectories))
    refused = client.post("/train/publish", json={})
    assert refused.status_code >= 400 and "wake_up?tags=weights" in refused.json()["error"]["message"]
    succeeded(client.post("/wake_up", params={"tags": "weights"}))
    publish(client)
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    succeeded(client.post("/wake_up", params={"tags": "kv_cache"}))
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
