"""AdamW with moments of 8 bit beside AdamW: how far apart they come, and what a restart finds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.trainer.restart_checkpoints import RestartCheckpoints, resume
from tests.trainers import tiny
from tests.trainers.test_sharded_loading import as_one_of
from trainers.learner import Learner
from trainers.learner_state import empty_moments, named_moments
from trainers.optimizer import build_optimizer
from trainers.settings import LearnerConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy

pytest.importorskip("torchao", reason="the extra moments8bit is not installed")
RATE = 1e-3
SMALL = tiny.model("llama", hidden_size=256, intermediate_size=32)
BATCH = [
    tiny.trajectory((3, 4), (5, 6, 1), advantage=1.0),
    tiny.trajectory((3, 4), (7, 1), advantage=-1.0),
]


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """torchao compiles its step for each shape, which takes seconds here and says nothing more."""
    with torch.compiler.set_stance("force_eager"):
        yield


def config(moments: Any) -> LearnerConfig:
    return LearnerConfig(optimizer=OptimizerConfig(learning_rate=RATE, moments=moments))


def learner(directory: Path, moments: Any) -> Learner:
    return Learner(TrainedPolicy.load(directory), config(moments))


def weights(of: Learner) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in of.policy.model.named_parameters()}


def test_steps_agree_with_adamw_within_a_fraction_of_the_learning_rate() -> None:
    """A step of AdamW is at most about the learning rate. Rounded moments change it by a few per cent."""
    torch.manual_seed(0)
    start, gradients = torch.randn(64, 256), [torch.randn(64, 256) for _ in range(20)]
    ends, moved = [], []
    for moments in ("full", "8bit"):
        weight = torch.nn.Parameter(start.clone())
        optimizer, _ = build_optimizer([weight], config(moments).optimizer)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        ends.append(weight.detach())
        moved.append((weight.detach() - start).norm())
    assert (ends[0] - ends[1]).norm() < 0.05 * moved[0]
    assert not torch.equal(*ends), "they were rounded"


def test_moments_take_a_byte_each(tmp_path: Path) -> None:
    SMALL.save_pretrained(tmp_path)
    trained = learner(tmp_path, "8bit")
    trained.step(BATCH)
    moments = named_moments(trained.policy, trained.optimizer.state)
    assert moments["exp_avg_codes"]["lm_head.weight"].dtype == torch.uint8
    assert moments["exp_avg_scale"]["lm_head.weight"].shape == (40, 1)
    assert "model.norm.weight" in moments["exp_avg"], "too small"
    assert "model.layers.0.mlp.down_proj.weight" in moments["exp_avg_sq"], "its rows are no blocks"


def test_a_checkpoint_continues_exactly_and_not_with_full_moments(tmp_path: Path) -> None:
    SMALL.save_pretrained(tmp_path)
    kept = RestartCheckpoints(tmp_path / "checkpoints", rank=0, keep=2)
    straight = learner(tmp_path, "8bit")
    straight.step(BATCH)
    assert kept.save(straight, wire_dtype=None)
    kept.wait_until_copied()
    assert kept.wait(60.0) and kept.complete()
    resumed, other = learner(tmp_path, "8bit"), learner(tmp_path, "full")
    for each in (resumed, other):
        each.policy.model.load_state_dict(straight.policy.model.state_dict())
    assert resume(resumed, kept, kept.complete(), 1) is None
    straight.step(BATCH)
    resumed.step(BATCH)
    after = weights(resumed)
    assert all(torch.equal(after[name], tensor) for name, tensor in weights(straight).items())
    problem = resume(other, kept, kept.complete(), 1)
    assert problem is not None and "moments start at zero" in problem and "got nothing" in problem


def test_a_shard_has_the_scales_of_its_own_rows(tmp_path: Path) -> None:
    SMALL.save_pretrained(tmp_path)
    torch.manual_seed(0)
    with as_one_of(2) as mesh:
        policy = TrainedPolicy.load(tmp_path, mesh=mesh)
        optimizer, _ = build_optimizer(policy.parameters(), config("8bit").optimizer)
        state = empty_moments(policy, optimizer, {"lm_head.weight"})
        moments = named_moments(policy, state)
        codes, scale = (moments[f"exp_avg_{part}"]["lm_head.weight"] for part in ("codes", "scale"))
        assert codes.shape == (40, 256) and scale.shape == (40, 1)
        assert codes.to_local().shape == (20, 256) and scale.to_local().shape == (20, 1)
        scale.to_local().fill_(3.0)
        (kept,) = state.values()
        assert set(kept["exp_avg"].to_local().scale.tolist()) == {3.0}, "it is the optimizer's own memory"
