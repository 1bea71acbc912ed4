"""A tiny learner's weights and checkpoints."""

from pathlib import Path
from typing import Any

import torch

from deployments.trainer.restart_checkpoints import RestartCheckpoints, resume
from tests.trainers import tiny
from trainers.learner import Learner
from trainers.settings import Dtype, LearnerConfig, OptimizerConfig
from trainers.sources import ParameterSource, load_parameters
from trainers.trained_policy import TrainedPolicy

CONFIG = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-4), share_prompts=False)
BATCH = [
    tiny.trajectory((3, 4), (5, 6, 1), advantage=1.0),
    tiny.trajectory((3, 4), (7, 1), advantage=-1.0),
]
Weights = dict[str, torch.Tensor]


def weights(policy: TrainedPolicy) -> Weights:
    return {name: tensor.clone() for name, tensor in ParameterSource(policy.model)}


def load(policy: TrainedPolicy, values: Weights, *, dtype: torch.dtype) -> None:
    """What a restarted trainer has read from the store."""
    load_parameters(policy.model, {name: value.to(dtype) for name, value in values.items()})


def equal(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def near(left: Weights, right: Weights) -> bool:
    return all(torch.allclose(left[name], right[name], rtol=1e-3, atol=2e-5) for name in left)


def checkpoints(directory: Path, *, rank: int = 0) -> RestartCheckpoints:
    return RestartCheckpoints(directory / "checkpoints", rank=rank, keep=2)


def save(
    learner: Learner, kept: RestartCheckpoints, *, wire_dtype: Dtype | None = None, **options: Any
) -> None:
    assert kept.save(learner, wire_dtype=wire_dtype, **options)
    kept.wait_until_copied()
    assert kept.wait(60.0)


def resumed_from(
    kept: RestartCheckpoints, learner: Learner, step: int, *, digest: str | None = None
) -> str | None:
    return resume(learner, kept, kept.complete(), step, digest)
