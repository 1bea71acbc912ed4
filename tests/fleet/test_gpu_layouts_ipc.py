"""Transport `ipc`: GPUs that an FSDP2 trainer shares with its fleet, and replicas on GPUs of their own.

The fleets that share are dense replicas, and one of spread experts. Their layouts are for four GPUs; with two
the same code runs with two ranks.
"""

from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from app.client import calls
from app.client.connection import FleetClient
from tests.fleet.gpu_fleets import INVARIANT, check_three_rounds, needs_gpus, tiny_fleet, trainers_answers
from tests.fleet.talk import PROMPT, complete, sampled, succeeded, train_and_publish
from tests.tiny_models import save_tiny_experts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]
TOKENS = 24
PROMPTS = [PROMPT, [40, 41, 42], list(range(10, 30))]


@pytest.mark.parametrize(
    ("count", "port"),
    [pytest.param(2, 8362, marks=needs_gpus(2)), pytest.param(4, 8371, marks=needs_gpus(4))],
    ids=["two", "four"],
)
def test_replicas_each_beside_a_rank_end_where_a_fresh_engine_begins(
    tmp_path: Path, count: int, port: int
) -> None:
    overrides = {"engine": {"env": INVARIANT, "num_replicas": count}, "trainer": {"world_size": count}}
    check_three_rounds("ipc_fsdp_dense", tmp_path, port, overrides, count=count)


@pytest.mark.parametrize(
    ("count", "port"),
    [pytest.param(1, 8379, marks=needs_gpus(2)), pytest.param(2, 8380, marks=needs_gpus(3))],
    ids=["one", "two"],
)
def test_replicas_on_other_gpus_end_where_a_fresh_engine_begins(
    tmp_path: Path, count: int, port: int
) -> None:
    overrides = {
        "engine": {"env": INVARIANT, "enforce_eager": True, "num_replicas": count},
        "weights": {"transport": "ipc", "chunk_bytes": 1 << 16},  # several chunks
    }
    check_three_rounds("nccl_two_replicas", tmp_path, port, overrides, count=count)


@pytest.mark.parametrize(
    ("count", "port"),
    [pytest.param(2, 8363, marks=needs_gpus(2)), pytest.param(4, 8372, marks=needs_gpus(4))],
    ids=["two", "four"],
)
def test_spread_experts_sleep_wake_update_and_end_where_a_fresh_engine_begins(
    tmp_path: Path, count: int, port: int
) -> None:
    overrides = {
        "engine": {"enforce_eager": True, "data_parallel_size": count},
        "weights": {"chunk_bytes": 1 << 20},
        "trainer": {"world_size": count},
    }
    save = partial(save_tiny_experts, seed=1, dtype=torch.bfloat16)
    with tiny_fleet("ipc_fsdp_ep", tmp_path, port, overrides, save) as made:
        client = made.client
        assert client.get("/get_world_size").json() == {"world_size": count}
        before = [complete(client, prompt, TOKENS).token_ids for prompt in PROMPTS]
        succeeded(client.post("/train/publish", json={}))
        train_and_publish(client)
        asleep_round(client)
        version = train_and_publish(client, sign=-1.0)
        print("last round", client.get("/fleet/rounds").json()["rounds"][-1])
        after = [complete(client, prompt, TOKENS) for prompt in PROMPTS]
        assert {answer.version for answer in after} == {version} == {4}
        expected = trainers_answers(made, tmp_path, TOKENS, PROMPTS)
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
    succeeded(client.post("/train/publish", json={}))
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    succeeded(client.post("/wake_up", params={"tags": "kv_cache"}))
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
