"""The whole application on one GPU: trainer and replica side by side, rounds over CUDA IPC."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray import serve

from tests.fleet.conftest import MODEL, Fleet, left_behind
from tests.fleet.talk import PROMPT, complete, train_and_publish
from tests.fleet.test_rounds import fresh_engine
from tests.tiny_models import save_tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]
PORT = 8347
# An engine whose answers do not depend on the batch, so that a fresh one gives the same tokens.
INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


@pytest.fixture
def gpu_fleet(tmp_path: Path) -> Iterator[Fleet]:
    checkpoint = save_tiny_llama(tmp_path / "model", seed=1, heads=2, dtype=torch.bfloat16)
    os.environ.update(INVARIANT)
    ray.init(include_dashboard=False, configure_logging=False, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    from app.config import parse_config
    from app.main import build

    config = parse_config(
        {
            "model": str(checkpoint),
            "served_model_name": MODEL,
            "device": "cuda",
            "placement": "colocated",
            "state_dir": str(tmp_path / "state"),
            "engine": {
                "num_replicas": 1,
                "dtype": "bfloat16",
                "max_model_len": 1024,
                "gpu_memory_utilization": 0.3,
                "gpus_per_rank": 0.5,
                "extra": {"attention_backend": "FLASH_ATTN"},
            },
            "weights": {"transport": "ipc", "staging": "device"},
            "trainer": {"dtype": "bfloat16", "gpus_per_rank": 0.5, "optimizer": {"learning_rate": 0.02}},
        }
    )
    try:
        serve.run(build(config), name="slipstream", route_prefix="/")
        yield Fleet(url=f"http://127.0.0.1:{PORT}", checkpoint=checkpoint, store=tmp_path / "state" / "store")
    finally:
        serve.shutdown()
        ray.shutdown()
        assert not left_behind()


def test_three_rounds_over_ipc_end_where_a_fresh_engine_begins(gpu_fleet: Fleet, tmp_path: Path) -> None:
    with gpu_fleet.client() as client:
        before = complete(client, max_tokens=24).tokens
        for _ in range(3):
            begin = time.perf_counter()
            version = train_and_publish(client)
            print(f"step and round {time.perf_counter() - begin:.3f} s")
        print("last round", client.get("/fleet/rounds").json()["rounds"][-1])
        saved = client.post("/train/save", json={"path": str(tmp_path / "saved")}).json()["path"]
        answer = complete(client, max_tokens=24)
        assert answer.version == version == 3
        assert answer.tokens != before
        extra = {"dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.2}
        extra["attention_backend"] = "FLASH_ATTN"
        assert [answer.tokens] == fresh_engine(Path(saved), [PROMPT], 24, tmp_path, **extra)
