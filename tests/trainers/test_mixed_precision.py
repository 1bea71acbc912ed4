"""Settings that save time or memory: what they may change, and what not."""

from pathlib import Path

import pytest
import torch

from tests.trainers import tiny
from trainers.learner import Learner
from trainers.settings import LearnerConfig, LoraConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy

CONFIG = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), max_tokens_per_microbatch=16)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_products_in_bfloat16_train_parameters_in_float32(tmp_path: Path, kind: str) -> None:
    tiny.save(tmp_path, kind)
    full, mixed = TrainedPolicy.load(tmp_path), TrainedPolicy.load(tmp_path, compute_dtype="bfloat16")
    learner, exact = Learner(mixed, CONFIG), Learner(full, CONFIG)
    metrics, expected = learner.step(tiny.BATCH), exact.step(tiny.BATCH)
    assert {p.dtype for p in mixed.model.parameters()} == {torch.float32}
    moments = learner.optimizer.state.values()
    assert {tensor.dtype for each in moments for tensor in each.values()} == {torch.float32}
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=0.05, abs=2e-3)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    assert metrics["loss"] != expected["loss"], "it is computed otherwise"


def test_updates_that_bfloat16_would_round_away_are_kept(tmp_path: Path) -> None:
    tiny.save(tmp_path, "llama")
    config = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-7, weight_decay=0.0))
    moved = {}
    for name, given in {
        "mixed": {"dtype": "float32", "compute_dtype": "bfloat16"},
        "bfloat16": {"dtype": "bfloat16"},
    }.items():
        policy = TrainedPolicy.load(tmp_path, **given)
        before = [parameter.detach().clone() for parameter in policy.model.parameters()]
        learner = Learner(policy, config)
        for _ in range(3):
            learner.step(tiny.BATCH)
        after = policy.model.parameters()
        changed = [(p != b).float().mean() for p, b in zip(after, before, strict=True)]
        moved[name] = float(torch.stack(changed).mean())
    assert moved["mixed"] > 0.3 and moved["bfloat16"] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lora"),
    [("llama-tied", None), ("qwen3", LoraConfig(name="a", rank=2)), ("qwen3-moe", None)],
)
def test_checkpointing_changes_no_number(tmp_path: Path, kind: str, lora: LoraConfig | None) -> None:
    tiny.save(tmp_path, kind)
    after = []
    for checkpointing in (False, "selective", True):
        policy = TrainedPolicy.load(tmp_path, activation_checkpointing=checkpointing)
        if lora is not None:
            policy.adapt(lora, seed=0)
        kept = tiny.kept_by_a_step(Learner(policy, CONFIG), tiny.BATCH)
        after.append((kept, [tensor.detach().clone() for tensor in policy.trained().values()]))
    (all_kept, expected), *others = after
    for _, made in others:
        assert all(torch.equal(left, right) for left, right in zip(expected, made, strict=True))
    assert all(kept < all_kept / 2 for kept, _ in others)
