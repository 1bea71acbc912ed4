"""Whole applications on GPUs: the ready-made configurations with tiny models, and engines to compare with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

from app.client.completions import Answer
from app.settings.config import AppConfig, parse_config
from examples import fresh_engine
from tests.fleet.deployed import MODEL, Fleet, merged, ray_cluster, served
from tests.fleet.talk import PROMPT, on_every_replica

LAYOUTS = Path(__file__).parents[2] / "app" / "layouts"
# An engine whose answers do not depend on the batch, so that a fresh one gives the same tokens.
INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
SMALL_ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.15,
    "load_format": "dummy",
    # A fixed size: other processes on the GPU would disturb vLLM's profile of free memory.
    "extra": {"attention_backend": "FLASH_ATTN", "kv_cache_memory_bytes": 1 << 30},
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


def check_against_a_fresh_engine(
    client: httpx.Client, config: AppConfig, saved: Path, before: Mapping[str, Answer], tokens: int
) -> int:
    """Every replica took part in the last round, serves its version, and answers as an engine from the
    trainer's checkpoint does.

    Args:
        saved: where the checkpoint is written.
        before: an answer of each replica, ahead of the rounds.

    Returns:
        The version.
    """
    last = client.get("/fleet/rounds").json()["rounds"][-1]
    print("last round", last)
    assert len(last["replicas"]) == len(before) and not last["fenced"]
    written = Path(client.post("/train/save", json={"path": str(saved)}).json()["path"])
    (expected,) = fresh_answers(config, written, [PROMPT], tokens)
    for replica, answer in on_every_replica(client, count=len(before), max_tokens=tokens).items():
        assert answer.version == last["version"]
        assert answer.token_ids == expected != before[replica].token_ids
    return int(last["version"])
