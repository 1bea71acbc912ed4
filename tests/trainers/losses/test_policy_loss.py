import math

import pytest
import torch

from tests.trainers.losses.batches import gradient, random_tokens, tokens
from trainers.loss_settings import Aggregation, KlEstimator, LossConfig
from trainers.losses.interface import LearnedTokens
from trainers.losses.policy_loss import importance_weights, k3, policy_loss, token_weights
from trainers.losses.registry import LOSSES, load_loss


def total(batch: LearnedTokens, config: LossConfig) -> torch.Tensor:
    lengths = batch.lengths
    weights = token_weights(lengths, int(lengths.sum()), len(lengths), config)
    return (policy_loss(batch, config, load_loss(config)).values * weights[batch.answers]).sum()


def test_on_policy_it_is_the_negative_mean_advantage_over_tokens() -> None:
    batch = tokens([-1.0, -2.0, -3.0], advantages=[1.0, 1.0, -2.0], lengths=[2, 1])
    loss = total(batch, LossConfig())
    assert float(loss.detach()) == pytest.approx(-(1 + 1 - 2) / 3)
    assert gradient(loss, batch) == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


def test_the_importance_weight_is_truncated_and_carries_no_gradient() -> None:
    batch = tokens([-1.0, -1.0], rollout=[-1.0 - math.log(5.0), -1.0 + math.log(2.0)])
    loss = total(batch, LossConfig())
    assert float(loss.detach()) == pytest.approx(-(2.0 + 0.5) / 2)
    assert gradient(loss, batch) == pytest.approx([-1.0, -0.25])


def test_gspos_importance_weight_is_one_for_an_answer_as_its_ratio() -> None:
    batch = tokens([-1.0] * 3, rollout=[-1.0 - math.log(1.2), -1.0 - math.log(1.8), -9.0], lengths=[2, 1])
    mean = math.sqrt(1.2 * 1.8)
    made = policy_loss(batch, LossConfig(name="gspo"), LOSSES["gspo"])
    assert gradient(made.values, batch) == pytest.approx([-mean, -mean, -2.0])


def test_without_a_cap_rollout_logprobs_are_not_used() -> None:
    batch = tokens([-1.0, -1.0], rollout=[0.0, -9.0])
    assert float(total(batch, LossConfig(importance_cap=None)).detach()) == pytest.approx(-1.0)


def test_a_kl_penalty_is_added_after_the_importance_weight() -> None:
    batch = tokens([-1.0], rollout=[-2.0], advantages=[0.0], reference=[-1.5])
    expected = math.exp(-0.5) - 1 + 0.5
    loss = policy_loss(batch, LossConfig(kl_coefficient=0.1), LOSSES["ppo_clip"]).values
    assert loss.tolist() == pytest.approx([0.1 * expected])


@pytest.mark.parametrize("estimator", [*KlEstimator])
def test_the_unbiased_penalty_alone_has_the_gradient_of_the_divergence(estimator: KlEstimator) -> None:
    """Over all tokens of a small vocabulary, each weighted with its probability, as if all were sampled."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.7], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    (expected,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True
    )
    batch = tokens([0.0] * 3, advantages=[0.0] * 3, reference=[0.0] * 3, dtype=torch.float64)
    fields = {name: getattr(batch, name) for name in LearnedTokens.__slots__} | {
        "logprobs": logprobs,
        "old_logprobs": logprobs.detach(),
        "rollout_logprobs": logprobs.detach(),
        "reference_logprobs": reference,
    }
    config = LossConfig(kl_coefficient=1.0, kl_estimator=estimator)
    values = policy_loss(LearnedTokens(**fields), config, LOSSES["ppo_clip"]).values
    (actual,) = torch.autograd.grad((values * logprobs.exp().detach()).sum(), logits)
    is_unbiased = estimator is KlEstimator.K3_UNBIASED
    assert torch.allclose(actual, expected) == is_unbiased


def test_the_gradient_agrees_with_finite_differences() -> None:
    batch = random_tokens([4, 4, 4], drift=0.05)
    config = LossConfig(kl_coefficient=0.1)

    def objective(logprobs: torch.Tensor) -> torch.Tensor:
        fields = {name: getattr(batch, name) for name in LearnedTokens.__slots__}
        return total(LearnedTokens(**(fields | {"logprobs": logprobs})), config)

    assert torch.autograd.gradcheck(objective, (batch.logprobs,))


@pytest.mark.parametrize("name", LOSSES)
def test_an_answer_without_learned_tokens_divides_nothing_by_zero(name: str) -> None:
    for aggregation in Aggregation:
        config = LossConfig(name=name, aggregation=aggregation)
        batch = tokens([-1.0], lengths=[1, 0])
        assert all(math.isfinite(value) for value in gradient(total(batch, config), batch))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation.TOKEN, [0.25, 0.25]),
        (Aggregation.SEQUENCE, [1 / 6, 1 / 2]),
        (Aggregation.CONSTANT, [1 / 20, 1 / 20]),
    ],
)
def test_token_weights_of_each_aggregation(aggregation: Aggregation, expected: list[float]) -> None:
    config = LossConfig(aggregation=aggregation, max_tokens=10)
    assert token_weights(torch.tensor([3, 1]), 4, 2, config).tolist() == pytest.approx(expected)


def test_k3_is_never_negative_and_zero_for_equal_policies() -> None:
    p, q = -torch.rand(100) * 5, -torch.rand(100) * 5
    assert bool((k3(p, q) >= 0).all())
    assert float(k3(p, p).abs().max()) == 0.0


def test_a_huge_importance_weight_stays_finite() -> None:
    assert math.isfinite(float(importance_weights(tokens([-0.1], rollout=[-500.0]), LossConfig())))
