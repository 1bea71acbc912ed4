import math

import pytest
import torch

from trainers.losses import LossTerms, importance_weights, k3, policy_loss, token_weights
from trainers.settings import Aggregation, LossConfig


def loss(
    current: list[list[float]],
    old: list[list[float]],
    rollout: list[list[float]],
    advantages: list[float],
    mask: list[list[bool]],
    config: LossConfig | None = None,
    reference: list[list[float]] | None = None,
) -> tuple[torch.Tensor, LossTerms]:
    config = LossConfig() if config is None else config
    logprobs = torch.tensor(current, requires_grad=True)
    real = torch.tensor(mask)
    terms = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.tensor(old),
        rollout_logprobs=torch.tensor(rollout),
        advantages=torch.tensor(advantages),
        mask=real,
        weights=token_weights(real.sum(1), int(real.sum()), len(mask), config),
        config=config,
        reference_logprobs=None if reference is None else torch.tensor(reference),
    )
    return logprobs, terms


def test_on_policy_it_is_the_negative_mean_advantage_over_tokens() -> None:
    logprobs, terms = loss(
        [[-1.0, -2.0], [-3.0, -9.0]],
        [[-1.0, -2.0], [-3.0, -9.0]],
        [[-1.0, -2.0], [-3.0, -9.0]],
        [1.0, -2.0],
        [[True, True], [True, False]],
    )
    assert float(terms.loss.detach()) == pytest.approx(-(1 + 1 - 2) / 3)
    terms.loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1 / 3, -1 / 3], [2 / 3, 0.0]]))


def test_the_clip_removes_the_gradient_of_a_good_token_whose_ratio_is_high() -> None:
    up = math.log(1.5)
    logprobs, terms = loss([[-1.0 + up]], [[-1.0]], [[-1.0]], [2.0], [[True]])
    assert float(terms.loss.detach()) == pytest.approx(-1.2 * 2.0)
    terms.loss.backward()
    assert logprobs.grad is not None and float(logprobs.grad) == 0.0
    assert float(terms.clipped) == 1.0


def test_the_clip_does_not_stop_a_bad_token_from_becoming_less_likely() -> None:
    up = math.log(1.5)
    logprobs, terms = loss([[-1.0 + up]], [[-1.0]], [[-1.0]], [-2.0], [[True]])
    assert float(terms.loss.detach()) == pytest.approx(1.5 * 2.0)
    terms.loss.backward()
    assert logprobs.grad is not None and float(logprobs.grad) == pytest.approx(3.0)


def test_the_importance_weight_is_truncated_and_carries_no_gradient() -> None:
    rollout = [[-1.0 - math.log(5.0), -1.0 + math.log(2.0)]]
    logprobs, terms = loss([[-1.0, -1.0]], [[-1.0, -1.0]], rollout, [1.0], [[True, True]])
    assert float(terms.loss.detach()) == pytest.approx(-(2.0 + 0.5) / 2)
    terms.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, -0.25]]))
    assert float(terms.importance) == pytest.approx(5.5) and float(terms.truncated) == 1.0


def test_the_gradient_agrees_with_finite_differences() -> None:
    torch.manual_seed(0)
    old, rollout, reference = (-torch.rand(3, 4, dtype=torch.float64) - 0.5 for _ in range(3))
    current = (old + 0.05 * torch.randn(3, 4, dtype=torch.float64)).requires_grad_()
    config = LossConfig(kl_coefficient=0.1)

    def objective(logprobs: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=rollout,
            advantages=torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64),
            mask=torch.ones(3, 4, dtype=torch.bool),
            weights=torch.full((3,), 1 / 12, dtype=torch.float64),
            config=config,
            reference_logprobs=reference,
        ).loss

    assert torch.autograd.gradcheck(objective, (current,))


def test_padding_may_be_infinite() -> None:
    _, terms = loss([[-1.0, -math.inf]], [[-1.0, -math.inf]], [[-1.0, 0.0]], [1.0], [[True, False]])
    assert float(terms.loss.detach()) == pytest.approx(-1.0)
    terms.loss.backward()
    assert math.isfinite(float(terms.importance))


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
    weights, truncated = importance_weights(torch.tensor([[-0.1]]), torch.tensor([[-500.0]]), 2.0)
    assert math.isfinite(float(weights)) and float(truncated) == 2.0
