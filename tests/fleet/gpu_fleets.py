"""Whole applications on GPUs: the ready-made configurations with tiny models, and engines to compare with."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import yaml

from app.settings.config import AppConfig, parse_config
from examples import fresh_engine
from tests.fleet.deployed import MODEL, Fleet, merged, ray_cluster, served
from tests.fleet.talk import PROMPT, on_every_replica, train_and_publish
from tests.tiny_models import save_tiny_llama

LAYOUTS = Path(__file__).parents[2] / "app" / "layouts"
# An engine whose answers do not depend on the batch, so that a fresh one gives the same tokens.
INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
SMALL_ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.15,
    # A fixed size: other processes on the GPU would disturb vLLM's profile of free memory.
    "extra": {
        "load_format": "dummy",
        "attention_backend": "FLASH_ATTN",
        "kv_cache_memory_bytes": 1 << 30,
    },
}


def needs_gpus(count: int) -> pytest.MarkDecorator:
    present = torch.cuda.device_count()
    return pytest.mark.skipif(present < count, reason=f"needs {count} GPUs, there are {present}")


def configuration(
    name: str, checkpoint: Path, state_dir: Path, overrides: Mapping[str, Any] | None = None
) -> AppConfig:
    """A ready-made layout with a tiny model: only sizes differ, and what `overrides` says."""
    document = yaml.safe_load((LAYOUTS / f"{name}.yaml").read_text())
    args = document["applications"][0]["args"]
    small = {
        "model": str(checkpoint),
        "served_model_name": MODEL,
        "state_dir": str(state_dir),
        "engine": SMALL_ENGINE,
    }
    if "trainer" in args:
        small["trainer"] = {"optimizer": {"learning_rate": 0.02}}  # a step changes the greedy answers
    return parse_config(merged(merged(args, small), overrides or {}))


@contextmanager
def running(config: AppConfig, checkpoint: Path, port: int) -> Iterator[Fleet]:
    """The application in a Ray cluster of its own. Afterwards nothing of it may be left."""
    # Ray starts a worker for each CPU: with 64 and twenty fleets, more threads than a kernel allows.
    with ray_cluster(num_cpus=8, object_store_memory=1 << 30), served(config, checkpoint, port) as fleet:
        yield fleet


def fresh_answers(config: AppConfig, saved: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy answers of an engine with the fleet's own arguments, started from a checkpoint by itself; one
    prompt at a time, as the fleet is asked."""
    from app.main import engine_spec

    own = {"load_format": "auto", "enable_sleep_mode": False}
    answers = fresh_engine.fresh_answers(
        str(saved),
        prompts,
        [count] * len(prompts),
        arguments={**engine_spec(config, str(saved)).arguments, **own},
        environment=config.engine.env,
        timeout_s=170,
    )
    return [list(answer.token_ids) for answer in answers]


class TinyFleet(NamedTuple):
    fleet: Fleet
    client: httpx.Client
    config: AppConfig


def save_model(directory: Path) -> Path:
    return save_tiny_llama(directory, seed=1, heads=2, dtype=torch.bfloat16)


@contextmanager
def tiny_fleet(
    layout: str,
    tmp_path: Path,
    port: int,
    overrides: Mapping[str, Any],
    save: Callable[[Path], Path] = save_model,
) -> Iterator[TinyFleet]:
    """`running` with a `configuration` of a model that is saved for it."""
    checkpoint = save(tmp_path / "model")
    config = configuration(layout, checkpoint, tmp_path / "state", overrides)
    with running(config, checkpoint, port) as fleet, fleet.client() as client:
        yield TinyFleet(fleet, client, config)


def trainers_answers(
    made: TinyFleet, tmp_path: Path, tokens: int, prompts: Sequence[list[int]] = (PROMPT,)
) -> list[list[int]]:
    """`fresh_answers` from the checkpoint of the trainer."""
    saved = made.client.post("/train/save", json={"path": str(tmp_path / "saved")}).json()["path"]
    return fresh_answers(made.config, Path(saved), [*prompts], tokens)


def check_three_rounds(
    layout: str, tmp_path: Path, port: int, overrides: Mapping[str, Any], *, count: int = 1, tokens: int = 24
) -> None:
    """Three rounds of the trainer reach `count` replicas, which end where a fresh engine begins."""
    with tiny_fleet(layout, tmp_path, port, overrides) as made:
        before = on_every_replica(made.client, count=count, max_tokens=tokens)
        for _ in range(3):
            begin = time.perf_counter()
            version = train_and_publish(made.client)
            print(f"step and round {time.perf_counter() - begin:.3f} s")
        last = made.client.get("/fleet/rounds").json()["rounds"][-1]
        print("last round", last)
        assert version == last["version"] == 3 and len(last["replicas"]) == count and not last["fenced"]
        (expected,) = trainers_answers(made, tmp_path, tokens)
        for replica, answer in on_every_replica(made.client, count=count, max_tokens=tokens).items():
            assert answer.version == version
            assert answer.token_ids == expected != before[replica].token_ids
