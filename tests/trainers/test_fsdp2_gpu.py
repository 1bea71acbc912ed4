"""FSDP2 on a GPU with what the layouts for GPUs set: sharding must not change any result."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.trainers import tiny
from tests.trainers.test_trained_policy import ANSWERS
from trainers.fsdp2 import mesh_of_all_ranks
from trainers.learner import Learner
from trainers.settings import LearnerConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy

pytestmark = pytest.mark.gpu
MIXED = {"compute_dtype": "bfloat16"}
CONFIG = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), max_tokens_per_microbatch=8)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Of one rank: a layer is gathered and cast, and nothing is sent."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        MIXED,
        MIXED | {"activation_checkpointing": True},
        MIXED | {"compile_layers": True},
        MIXED | {"packed": True},
        MIXED | {"packed": True, "compile_layers": True},
    ],
    ids=lambda given: "+".join(given) or "float32",
)
def test_every_step_is_that_of_a_whole_model(tmp_path: Path, kind: str, given: dict[str, Any]) -> None:
    tiny.save(tmp_path, kind, head_dim=16)
    whole = Learner(TrainedPolicy.load(tmp_path, device="cuda", **given), CONFIG)
    policy = TrainedPolicy.load(tmp_path, mesh=mesh_of_all_ranks("cuda"), **given)
    sharded = Learner(policy, CONFIG)
    relative = 0.1 if given else 1e-3  # bfloat16 rounds differently in every kernel
    losses = []
    for _ in range(4):
        _copy(policy, whole.policy)  # rounding is magnified by AdamW's first steps
        expected, metrics = whole.step(ANSWERS), sharded.step(ANSWERS)
        for name in ("loss", "entropy", "grad_norm"):
            assert metrics[name] == pytest.approx(expected[name], rel=relative, abs=0.02), name
        losses.append(metrics["loss"])
    assert losses[-1] < losses[0] - 0.1, "it learns"


@torch.no_grad()
def _copy(sharded: TrainedPolicy, whole: TrainedPolicy) -> None:
    for source, target in zip(sharded.parameters(), whole.parameters(), strict=True):
        target.copy_(source.full_tensor())  # type: ignore[attr-defined]
