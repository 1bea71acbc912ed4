import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainers import tiny
from tests.trainers.learning import ANSWERS, CONFIG, PROMPT, on_policy, with_changes
from trainers.learner import Learner
from trainers.settings import LossConfig, OptimizerConfig, StepSettings
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import VersionSpan


def test_the_gradient_is_that_of_reinforce_written_out(tmp_path: Path) -> None:
    policy, plain = tiny.policy(tmp_path), TrainedPolicy.load(tmp_path)
    batch = on_policy(policy, ANSWERS)
    loss = torch.tensor(0.0)
    for answer in batch:
        ids = torch.tensor([answer.prompt_token_ids + answer.token_ids])
        logprobs = torch.log_softmax(plain.model(input_ids=ids).logits[0], -1)
        for i, token in enumerate(answer.token_ids):
            loss = loss - answer.advantage * logprobs[len(PROMPT) - 1 + i, token] / 8
    loss.backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.model.parameters() if p.grad is not None])
    assert Learner(policy, CONFIG).step(batch)["grad_norm"] == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("updates", [1, 2])
def test_scores_are_of_the_current_weights_in_the_order_of_the_sequences(
    tmp_path: Path, updates: int
) -> None:
    policy = tiny.policy(tmp_path)
    learner = Learner(policy, with_changes(max_tokens_per_microbatch=4, updates_per_step=updates))
    sequences = [((3, 4), 5), ((6, 7, 8, 9, 10), 11), ((12,), 13), ((14, 15, 16), 17)]
    learner.step(on_policy(policy, ANSWERS))
    with torch.no_grad():
        logits = [policy.model(input_ids=torch.tensor([prompt])).logits[0, -1] for prompt, _ in sequences]
    tokens = [token for _, token in sequences]
    expected = [float(torch.log_softmax(row, -1)[token]) for row, token in zip(logits, tokens, strict=True)]
    assert learner.score(sequences) == pytest.approx(dict(enumerate(expected)), abs=1e-5)


def test_micro_batches_change_nothing_but_memory(tmp_path: Path) -> None:
    whole, parts = tiny.policy(tmp_path), TrainedPolicy.load(tmp_path)
    batch = on_policy(whole, ANSWERS)
    Learner(whole, CONFIG).step(batch)
    Learner(parts, with_changes(max_tokens_per_microbatch=6)).step(batch)
    torch.testing.assert_close(tiny.trained(whole), tiny.trained(parts), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("field", ["advantage", "logprobs"])
def test_a_loss_that_is_not_finite_changes_nothing(tmp_path: Path, field: str) -> None:
    policy = tiny.policy(tmp_path)
    learner = Learner(policy, CONFIG)
    before = tiny.trained(policy)
    bad = float("nan") if field == "advantage" else (float("nan"),) * 3
    metrics = learner.step([replace(on_policy(policy, ANSWERS)[0], **{field: bad})])
    assert metrics["skipped"] is True and metrics["step"] == 0
    assert tiny.equal(before, tiny.trained(policy))
    assert learner.step(on_policy(policy, ANSWERS))["skipped"] is False


def test_several_updates_on_a_batch_move_the_ratio_away_from_one(tmp_path: Path) -> None:
    policy = tiny.policy(tmp_path)
    config = with_changes(updates_per_step=3, optimizer=OptimizerConfig(learning_rate=1e-2))
    metrics = Learner(policy, config).step(on_policy(policy, ANSWERS))
    assert metrics["ratio_mean"] != pytest.approx(1.0, abs=1e-3)
    assert metrics["clipped_fraction"] > 0
    assert metrics["step"] == 1


def test_a_step_counts_if_only_a_later_update_is_not_finite(tmp_path: Path) -> None:
    policy = tiny.policy(tmp_path)
    before = tiny.trained(policy)
    config = with_changes(updates_per_step=3, optimizer=OptimizerConfig(learning_rate=1e30))
    learner = Learner(policy, config)
    metrics = learner.step(on_policy(policy, ANSWERS))
    assert metrics["skipped"] is False and metrics["step"] == learner.steps_done == 1
    assert math.isfinite(metrics["loss"]), "the metrics of the update that was applied"
    assert not tiny.equal(before, tiny.trained(policy))


@pytest.mark.slow
def test_a_kl_penalty_keeps_the_policy_near_its_reference(tmp_path: Path) -> None:
    moved = []
    for coefficient in (0.0, 10.0):
        policy, reference = tiny.policy(tmp_path), TrainedPolicy.load(tmp_path)
        config = with_changes(
            optimizer=OptimizerConfig(learning_rate=1e-3), loss=LossConfig(kl_coefficient=coefficient)
        )
        learner = Learner(policy, config, reference=reference if coefficient else None)
        batch = on_policy(policy, ANSWERS)
        for _ in range(20):
            learner.step(batch)
        now = on_policy(policy, ANSWERS)
        moved.append(sum(abs(sum(a.logprobs) - sum(b.logprobs)) for a, b in zip(batch, now, strict=True)))
    assert moved[1] < moved[0] / 2


@pytest.mark.parametrize("updates", [1, 2])
def test_constrained_tokens_are_learned_from_as_if_the_policy_had_chosen_among_all(
    tmp_path: Path, updates: int
) -> None:
    """With a grammar the engine reports 0.0 for a token that was the only choice."""
    plain, constrained = tiny.policy(tmp_path), TrainedPolicy.load(tmp_path)
    batch = on_policy(plain, ANSWERS)
    forced = [
        replace(each, logprobs=(0.0,) * len(each.logprobs), constrained=(True,) * len(each.logprobs))
        for each in batch
    ]
    config = with_changes(updates_per_step=updates)
    expected, got = Learner(plain, config).step(batch), Learner(constrained, config).step(forced)
    assert got.pop("constrained_fraction") == 1.0 and got["importance_mean"] == 1.0
    assert expected["importance_mean"] == pytest.approx(1.0, abs=1e-5)
    assert got.keys() == expected.keys()
    torch.testing.assert_close(tiny.trained(plain), tiny.trained(constrained), rtol=1e-4, atol=1e-6)


def test_masked_tokens_and_completions_have_no_gradient_and_count_nowhere(tmp_path: Path) -> None:
    """Whatever is behind them: a tool's tokens have no log-probability, and no advantage."""
    plain, masked = tiny.policy(tmp_path), TrainedPolicy.load(tmp_path)
    first, *others = on_policy(plain, ANSWERS)
    tool = (20, 21)
    longer = replace(
        first,
        token_ids=first.token_ids + tool,
        logprobs=(*first.logprobs, 0.0, float("nan")),
        advantage=(1.0, 1.0, 1.0, float("nan"), 5.0),
        loss_mask=(True, True, True, False, False),
    )
    silent = replace(others[0], loss_mask=(False,) * len(others[0].token_ids))
    for config in (CONFIG, with_changes(max_tokens_per_microbatch=8)):
        expected = Learner(plain, config).step([first, *others])
        actual = Learner(masked, config).step([longer, *others, silent])
        assert actual["tokens"] == expected["tokens"] == 8
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_each_token_is_moved_by_its_own_advantage(tmp_path: Path) -> None:
    policy = tiny.policy(tmp_path)
    (answer,) = on_policy(policy, {(6, 7): 1.0})
    Learner(policy, with_changes(optimizer=OptimizerConfig(learning_rate=1e-3))).step(
        [replace(answer, advantage=(1.0, -1.0))]
    )
    (after,) = on_policy(policy, {(6, 7): 1.0})
    assert after.logprobs[0] > answer.logprobs[0] and after.logprobs[1] < answer.logprobs[1]


def test_a_restarted_learner_has_the_configured_rate_in_every_step(tmp_path: Path) -> None:
    policy = tiny.policy(tmp_path)
    batch = on_policy(policy, ANSWERS)
    learner = Learner(policy, with_changes(optimizer=OptimizerConfig(learning_rate=1e-6)))
    learner.restart(1, keep_moments=True)
    assert [learner.step(batch)["learning_rate"] for _ in range(3)] == [1e-6] * 3


def test_staleness_is_counted_from_what_the_trainer_published_last(tmp_path: Path) -> None:
    policy = tiny.policy(tmp_path)
    learner = Learner(policy, CONFIG)
    fresh, old, unknown = on_policy(policy, ANSWERS)
    fresh = replace(fresh, weight_versions=(VersionSpan(version=5, start=0, end=3),))
    old = replace(old, weight_versions=(VersionSpan(version=2, start=0, end=2),))
    first = learner.step([fresh, old, unknown], published=5)
    assert (first["staleness_mean"], first["staleness_max"]) == (pytest.approx(2 * 3 / 5), 3)
    assert (first["tokens_staleness_0"], first["tokens_staleness_2_plus"]) == (3, 2)
    assert "tokens_staleness_1" not in first
    assert first["logprob_difference_max"] == pytest.approx(0.0, abs=1e-4)
    second = learner.step([fresh, old, unknown], published=5)
    assert "logprob_difference_mean" not in second, "the policy has changed since it was published"
    moved = learner.step([fresh], published=6)
    assert moved["staleness_mean"] == 1.0
    assert "staleness_mean" not in learner.step([fresh, old, unknown])


def test_a_step_may_have_settings_of_its_own(tmp_path: Path) -> None:
    policy = tiny.policy(tmp_path)
    batch = on_policy(policy, ANSWERS)
    learner = Learner(policy, with_changes(optimizer=OptimizerConfig(learning_rate=1e-6)))
    rates, ratios = [], []
    for settings in (
        StepSettings(),
        StepSettings(learning_rate=0.25, updates_per_step=2),
        StepSettings(loss=LossConfig(name="sft")),
        StepSettings(),
    ):
        learner.apply(settings)
        metrics = learner.step(batch)
        rates.append(metrics["learning_rate"])
        ratios.append(metrics.get("ratio_mean"))
    assert rates == [1e-6, 0.25, 1e-6, 1e-6]
    assert ratios[1] != pytest.approx(1.0), "of the second update"
    assert learner.steps_done == 4
    with pytest.raises(ValueError, match=r"'loss.kl_coefficient': expected 0, got 0.5 .* no reference model"):
        learner.apply(StepSettings(loss=LossConfig(kl_coefficient=0.5)))
    with pytest.raises(
        ValueError, match=r"got 'os:system' \(a loss of your own is loaded when the trainer is"
    ):
        learner.apply(StepSettings(loss=LossConfig(name="os:system")))
    assert learner.step(batch)["learning_rate"] == 1e-6


def test_a_steps_rate_follows_the_deployments_schedule(tmp_path: Path) -> None:
    policy = tiny.policy(tmp_path)
    learner, batch = Learner(policy, CONFIG), on_policy(policy, ANSWERS)
    deployed = [learner.step(batch)["learning_rate"] for _ in range(2)]
    other = Learner(policy, CONFIG)
    other.apply(StepSettings(learning_rate=10 * CONFIG.optimizer.learning_rate))
    assert [other.step(batch)["learning_rate"] for _ in range(2)] == pytest.approx([10 * x for x in deployed])
