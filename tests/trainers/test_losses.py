"""Each loss as its paper writes it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainers import tiny
from tests.trainers.learning import ANSWERS, PROMPT, on_policy, with_changes
from tests.trainers.loss_batches import gradient, random_tokens, tokens
from trainers.estimators import DISTILLING
from trainers.learner import Learner
from trainers.losses import (
    LOSSES,
    LearnedTokens,
    importance_weights,
    load_loss,
    policy_loss,
    token_weights,
)
from trainers.settings import DEFAULTS, Aggregation, KlEstimator, LossConfig
from trainers.trained_policy import TrainedPolicy


def total(batch: LearnedTokens, config: LossConfig) -> torch.Tensor:
    lengths = batch.lengths
    weights = token_weights(lengths, int(lengths.sum()), len(lengths), config)
    return (policy_loss(batch, config, load_loss(config)).values * weights[batch.completions]).sum()


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


def test_gspos_importance_weight_is_that_of_its_completion() -> None:
    batch = tokens([-1.0] * 3, rollout=[-1.0 - math.log(1.2), -1.0 - math.log(1.8), -9.0], lengths=[2, 1])
    mean = math.sqrt(1.2 * 1.8)
    made = policy_loss(batch, LossConfig(name="gspo"), LOSSES["gspo"])
    assert gradient(made.values, batch) == pytest.approx([-mean, -mean, -2.0])


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
def test_a_completion_without_learned_tokens_divides_nothing_by_zero(name: str) -> None:
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


def test_a_huge_importance_weight_stays_finite() -> None:
    assert math.isfinite(float(importance_weights(tokens([-0.1], rollout=[-500.0]), LossConfig())))


CLIPPED = ("ppo_clip", "grpo", "dr_grpo", "dapo", "reinforce_pp")
UP, DOWN = math.log(1.5), math.log(0.5)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("sft", *DISTILLING)])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    on_policy = tokens([-1.0, -2.0, -3.0], advantages=[1.0, 1.0, -2.0], lengths=[2, 1])
    made = LOSSES[name](on_policy, LossConfig(name=name))
    assert gradient(made.values, on_policy) == pytest.approx([-1.0, -1.0, 2.0])
    assert made.clipped is None or not bool(made.clipped.any())


@pytest.mark.parametrize("name", CLIPPED)
def test_the_clip_holds_back_good_tokens_and_not_bad_ones(name: str) -> None:
    batch = tokens([-1.0 + UP] * 2, old=[-1.0] * 2, advantages=[2.0, -2.0])
    config = LossConfig(name=name)
    made = LOSSES[name](batch, config)
    assert made.values.tolist() == pytest.approx([-(1.0 + config.clip_high) * 2.0, 1.5 * 2.0])
    assert gradient(made.values, batch) == pytest.approx([0.0, 3.0])
    assert made.clipped is not None and made.clipped.tolist() == [True, False]


def test_gspo_has_one_ratio_per_completion() -> None:
    batch = tokens([-1.0 + 2e-4, -1.0, -1.0 + UP], old=[-1.0] * 3, lengths=[2, 1])
    made = LOSSES["gspo"](batch, LossConfig(name="gspo"))
    mean = math.exp(1e-4)
    assert made.values.tolist() == pytest.approx([-mean, -mean, -(1 + 4e-4)], rel=1e-6)
    assert gradient(made.values, batch) == pytest.approx([-mean, -mean, 0.0], rel=1e-6)
    assert made.clipped is not None and made.clipped.tolist() == [False, False, True]


def test_cispo_truncates_the_weight_and_keeps_the_gradient() -> None:
    batch = tokens([-1.0, -1.0], old=[-1.0 - math.log(9), -1.0 - UP])
    made = LOSSES["cispo"](batch, LossConfig(name="cispo"))
    assert gradient(made.values, batch) == pytest.approx([-5.0, -1.5])
    assert made.clipped is not None and made.clipped.tolist() == [True, False]


def test_rloo_weights_a_completion_with_the_ratio_of_all_its_tokens() -> None:
    batch = tokens([-1.0 + UP, -1.0 + DOWN, -2.0], old=[-1.0, -1.0, -2.0], lengths=[2, 1])
    made = LOSSES["rloo"](batch, LossConfig(name="rloo"))
    assert gradient(made.values, batch) == pytest.approx([-0.75, -0.75, -1.0])


def test_sft_reads_no_advantage_and_no_rollout() -> None:
    batch = tokens([-1.0, -2.0], old=[-9.0, -9.0], rollout=[0.0, 0.0], advantages=[0.0, math.nan])
    made = LOSSES["sft"](batch, LossConfig(name="sft"))
    assert made.values.tolist() == [1.0, 2.0] and gradient(made.values, batch) == [-1.0, -1.0]


OWN = "tests.trainers.own_losses"


def test_a_users_loss_is_imported_and_reads_its_options() -> None:
    config = LossConfig(name=f"{OWN}:plain", options={"scale": 3.0})
    batch = tokens([-1.0, -2.0])
    assert gradient(load_loss(config)(batch, config).values, batch) == [-3.0, -3.0]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("absent", "cannot be imported: .*absent"),
        ("NOT_A_FUNCTION", "fails on three tokens: TypeError"),
        ("failing", "fails on three tokens: RuntimeError..the shapes differ"),
        ("one_argument", "fails on three tokens: TypeError"),
        (
            "summed",
            "must return TokenLosses with one value and its gradient for each of 3 tokens",
        ),
        (
            "detached",
            "must return TokenLosses with one value and its gradient for each of 3 tokens",
        ),
        ("bare", "must return TokenLosses .* got tensor"),
    ],
)
def test_a_users_loss_that_does_not_fit_is_refused_when_it_is_loaded(function: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"the loss '{OWN}:{function}' {sentence}"):
        load_loss(LossConfig(name=f"{OWN}:{function}"))


# -- what a policy learns with each of the losses --------------------------------------------------


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name not in DISTILLING])
def test_every_loss_makes_what_it_should_likelier(tmp_path: Path, name: str) -> None:
    policy = tiny.policy(tmp_path)
    before = {t.token_ids: sum(t.logprobs) for t in on_policy(policy, ANSWERS)}
    metrics = Learner(policy, with_changes(loss=LossConfig(name=name))).step(on_policy(policy, ANSWERS))
    after = {t.token_ids: sum(t.logprobs) for t in on_policy(policy, ANSWERS)}
    assert after[(6, 7, 1)] > before[(6, 7, 1)] and metrics["skipped"] is False
    assert (after[(8, 1)] > before[(8, 1)]) == (name == "sft"), "it imitates the bad answer too"
    assert ("importance_mean" in metrics) == (name != "sft")


def test_sfts_loss_is_transformers_own(tmp_path: Path) -> None:
    policy, other = tiny.policy(tmp_path), TrainedPolicy.load(tmp_path)
    batch = [
        replace(each, loss_mask=(True, *(False, True)[: len(each.token_ids) - 1]))
        for each in (on_policy(policy, ANSWERS))
    ]
    longest = max(map(len, batch))
    ids, labels = torch.zeros(2, len(batch), longest, dtype=torch.int64)
    labels.fill_(-100)
    for row, each in enumerate(batch):
        ids[row, : len(each)] = torch.tensor(each.prompt_token_ids + each.token_ids)
        learned = torch.tensor((False,) * len(PROMPT) + (each.loss_mask or ()))
        labels[row, : len(each)][learned] = ids[row, : len(each)][learned]
    loss = other.model(input_ids=ids, labels=labels).loss
    loss.backward()
    gradients = [p.grad for p in other.model.parameters() if p.grad is not None]
    metrics = Learner(policy, with_changes(loss=LossConfig(name="sft"))).step(batch)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-4)
