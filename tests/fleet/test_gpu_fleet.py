"""The whole application on one GPU: trainer and replica side by side, rounds over CUDA IPC."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from tests.fleet.gpu_fleets import INVARIANT, check_three_rounds, needs_gpus, tiny_fleet, trainers_answers
from tests.fleet.talk import complete, stored, succeeded, train_and_publish
from tests.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(520)]
PORTS = {"device": 8347, "host": 8348, "none": 8349}  # side by side on three GPUs
SLEEP_PORTS = {"device": 8358, "host": 8359, "none": 8360}
RESTART_PORTS = (8361, 8364)
MERGED_PORTS = {"ipc": 8344, "ipc_fsdp_dense": 8345}
TOKENS = 24


@needs_gpus(1)
@pytest.mark.parametrize("staging", PORTS)
def test_three_rounds_over_ipc_end_where_a_fresh_engine_begins(tmp_path: Path, staging: str) -> None:
    overrides = {"engine": {"env": INVARIANT}, "weights": {"staging": staging}}
    check_three_rounds("ipc", tmp_path, PORTS[staging], overrides)


@needs_gpus(1)
@pytest.mark.parametrize("staging", SLEEP_PORTS)
def test_weights_that_a_sleep_discarded_come_back_with_a_round(tmp_path: Path, staging: str) -> None:
    engine = {"env": INVARIANT, "extra": {"enable_sleep_mode": True}}
    overrides = {"engine": engine, "weights": {"staging": staging}}
    with tiny_fleet("ipc", tmp_path, SLEEP_PORTS[staging], overrides) as (_, client, _):
        version = train_and_publish(client)
        before = complete(client, max_tokens=TOKENS)
        succeeded(client.post("/sleep", params={"level": 2}))
        assert client.post("/wake_up").status_code == 409
        succeeded(client.post("/wake_up", params={"tags": "weights"}))
        succeeded(client.post("/train/publish", json={}))
        succeeded(client.post("/wake_up", params={"tags": "kv_cache"}))
        after = complete(client, max_tokens=TOKENS)
        assert (after.token_ids, after.version) == (before.token_ids, version + 1)


@pytest.mark.parametrize(
    ("layout", "port"),
    [
        pytest.param("ipc", RESTART_PORTS[0], marks=needs_gpus(1), id="same_gpu"),
        pytest.param("async_inflight", RESTART_PORTS[1], marks=needs_gpus(2), id="another_gpu"),
    ],
)
def test_a_trainer_that_takes_the_place_of_a_killed_one_shares_its_own_tensors(
    tmp_path: Path, layout: str, port: int
) -> None:
    # In float32 they would be cast for each round, into buffers.
    overrides = {
        "engine": {"env": INVARIANT, "enforce_eager": True},
        "weights": {"transport": "ipc"},
        "trainer": {"dtype": "bfloat16"},
    }
    with tiny_fleet(layout, tmp_path, port, overrides) as made:
        fleet, client, _ = made
        version = train_and_publish(client)
        until(stored(fleet, version).exists, 120, "the version is stored")
        before = complete(client, max_tokens=TOKENS)
        kill_first_rank()
        assert complete(client, max_tokens=TOKENS).token_ids == before.token_ids
        until_replaced(client)
        assert client.get("/train/status").json()["version"] == version
        assert train_and_publish(client) == version + 1
        answer = complete(client, max_tokens=TOKENS)
        assert [answer.token_ids] == trainers_answers(made, tmp_path, TOKENS) != [before.token_ids]


@pytest.mark.parametrize(
    "layout", [pytest.param("ipc", marks=needs_gpus(1)), pytest.param("ipc_fsdp_dense", marks=needs_gpus(2))]
)
def test_the_sum_of_an_adapter_and_its_model_is_the_next_version_also_after_a_kill(
    tmp_path: Path, layout: str
) -> None:
    ranks = 2 if layout == "ipc_fsdp_dense" else 1
    overrides = {
        "engine": {"env": INVARIANT, "enforce_eager": True, "num_replicas": ranks},
        "trainer": {
            "lora": {"publish": "merged", "rank": 4, "alpha": 16.0},
            "optimizer": {"learning_rate": 0.05},
            "world_size": ranks,
        },
    }
    with tiny_fleet(layout, tmp_path, MERGED_PORTS[layout], overrides) as made:
        fleet, client, _ = made
        before = complete(client, max_tokens=TOKENS).token_ids
        version = train_and_publish(client)
        first = complete(client, max_tokens=TOKENS).token_ids
        until(stored(fleet, version).exists, 120, "the version is stored")
        kill_first_rank()
        until_replaced(client)
        assert train_and_publish(client) == version + 1
        assert client.get("/train/status").json()["step"] == 2
        answer = complete(client, max_tokens=TOKENS).token_ids
        assert [answer] == trainers_answers(made, tmp_path, TOKENS)
        assert before != first != answer


def kill_first_rank() -> None:
    handle: Any = serve.get_deployment_handle("trainer", app_name="slipstream")
    first, *_ = handle.process_ids.remote().result(timeout_s=30)
    os.kill(first, signal.SIGKILL)


def until_replaced(client: httpx.Client) -> None:
    until(lambda: client.get("/train/status").is_error, 120, "the trainer's end is noticed")
    until(lambda: client.get("/train/status").is_success, 120, "the trainer is back")
