"""Each loss as its paper writes it."""

import math

import pytest
import torch

from tests.trainers.losses.batches import gradient, random_tokens, tokens
from trainers.loss_settings import LossConfig
from trainers.losses.registry import LOSSES

CLIPPED = ("ppo_clip", "grpo", "dr_grpo", "dapo", "reinforce_pp")
UP, DOWN = math.log(1.5), math.log(0.5)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sft"])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    on_policy = tokens([-1.0, -2.0, -3.0], advantages=[1.0, 1.0, -2.0], lengths=[2, 1])
    made = LOSSES[name](on_policy, LossConfig(name=name))
    assert gradient(made.values, on_policy) == pytest.approx([-1.0, -1.0, 2.0])
    assert made.clipped is None or not bool(made.clipped.any())


@pytest.mark.parametrize("name", LOSSES)
def test_every_token_has_a_value_and_a_gradient(name: str) -> None:
    batch = random_tokens([3, 1, 4], drift=0.05)
    config = LossConfig(name=name)
    base = LOSSES[name](batch, config).values
    assert bool(torch.isfinite(base).all()) and base.shape == (8,)
    actual = torch.tensor(gradient(base, batch), dtype=torch.float64)
    if name in CLIPPED:
        ratio = (batch.logprobs - batch.old_logprobs).exp().detach()
        kept = (-ratio * batch.advantages - base.detach()).abs() < 1e-12
        expected = torch.where(kept, -ratio * batch.advantages, 0.0)
        torch.testing.assert_close(actual, expected)
    if name == "sft":
        assert actual.tolist() == [-1.0] * 8 and base.tolist() == (-batch.logprobs).tolist()


@pytest.mark.parametrize("name", CLIPPED)
def test_the_clip_removes_the_gradient_of_a_good_token_whose_ratio_is_high(name: str) -> None:
    batch = tokens([-1.0 + UP], old=[-1.0], advantages=[2.0])
    config = LossConfig(name=name)
    made = LOSSES[name](batch, config)
    assert float(made.values.detach()) == pytest.approx(-(1.0 + config.clip_high) * 2.0)
    assert gradient(made.values, batch) == [0.0]
    assert made.clipped is not None and made.clipped.tolist() == [True]


@pytest.mark.parametrize("name", CLIPPED)
def test_the_clip_does_not_stop_a_bad_token_from_becoming_less_likely(name: str) -> None:
    batch = tokens([-1.0 + UP], old=[-1.0], advantages=[-2.0])
    made = LOSSES[name](batch, LossConfig(name=name))
    assert float(made.values.detach()) == pytest.approx(1.5 * 2.0)
    assert gradient(made.values, batch) == pytest.approx([3.0])


def test_gspo_has_one_ratio_for_an_answer() -> None:
    batch = tokens([-1.0 + 2e-4, -1.0, -1.0 + UP], old=[-1.0] * 3, lengths=[2, 1])
    made = LOSSES["gspo"](batch, LossConfig(name="gspo"))
    mean = math.exp(1e-4)
    assert made.values.tolist() == pytest.approx([-mean, -mean, -(1 + 4e-4)], rel=1e-6)
    assert gradient(made.values, batch) == pytest.approx([-mean, -mean, 0.0], rel=1e-6)
    assert made.clipped is not None and made.clipped.tolist() == [False, False, True]


def test_gspo_takes_an_answer_without_tokens() -> None:
    batch = tokens([-1.0], lengths=[0, 1, 0])
    made = LOSSES["gspo"](batch, LossConfig(name="gspo"))
    assert made.values.tolist() == [-1.0] and gradient(made.values, batch) == [-1.0]


def test_cispo_truncates_the_weight_and_keeps_the_gradient() -> None:
    batch = tokens([-1.0, -1.0], old=[-1.0 - math.log(9), -1.0 - UP])
    made = LOSSES["cispo"](batch, LossConfig(name="cispo"))
    assert gradient(made.values, batch) == pytest.approx([-5.0, -1.5])
    assert made.clipped is not None and made.clipped.tolist() == [True, False]


def test_rloo_weights_an_answer_with_the_ratio_of_all_its_tokens() -> None:
    batch = tokens([-1.0 + UP, -1.0 + DOWN, -2.0], old=[-1.0, -1.0, -2.0], lengths=[2, 1])
    made = LOSSES["rloo"](batch, LossConfig(name="rloo"))
    assert gradient(made.values, batch) == pytest.approx([-0.75, -0.75, -1.0])


def test_sft_reads_no_advantage_and_no_rollout() -> None:
    batch = tokens([-1.0, -2.0], old=[-9.0, -9.0], rollout=[0.0, 0.0], advantages=[0.0, math.nan])
    made = LOSSES["sft"](batch, LossConfig(name="sft"))
    assert made.values.tolist() == [1.0, 2.0] and gradient(made.values, batch) == [-1.0, -1.0]
