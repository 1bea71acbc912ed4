from pathlib import Path

import pytest

from tests.fleet.adapter_talk import entries
from tests.fleet.gpu_fleets import INVARIANT, needs_gpus, tiny_fleet
from tests.fleet.talk import complete, succeeded, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]
TOKENS = 24


@pytest.mark.parametrize(
    ("layout", "port", "replicas"),
    [
        pytest.param("ipc", 8394, 1, marks=needs_gpus(1)),
        pytest.param("ipc_fsdp_dense", 8395, 2, marks=needs_gpus(2)),
    ],
)
def test_what_a_trainer_publishes_reaches_every_replica(
    tmp_path: Path, layout: str, port: int, replicas: int
) -> None:
    extra = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}
    overrides = {
        "engine": {"env": INVARIANT, "enforce_eager": True, "extra": extra, "num_replicas": replicas},
        "weights": {"staging": "host"},
        "trainer": {
            "lora": {"name": "trained", "rank": 4, "alpha": 16.0},
            "optimizer": {"learning_rate": 0.05},
            "world_size": replicas if layout == "ipc_fsdp_dense" else 1,
        },
    }
    with tiny_fleet(layout, tmp_path, port, overrides) as (_, client, _):
        before = complete(client, max_tokens=TOKENS).token_ids
        for version in (1, 2, 3):
            train(client)
            published = succeeded(client.post("/train/publish", json={}))
            assert published.json()["version"] == version
            [status] = [each for each in entries(client) if each["version"] == version]
            assert len(status["replicas"]) == replicas
            report = client.get("/train/status").json()["last_adapter"]
            print(f"publish {report['duration_s']:.4f} s")
        asked = {
            "model": "trained@3",
            "prompt": [5, 6, 7],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        assert succeeded(client.post("/v1/completions", json=asked)).json()["adapter"] == "trained@3"
        assert complete(client, max_tokens=TOKENS).token_ids == before, "the base stays"
