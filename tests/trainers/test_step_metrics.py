import math
from collections.abc import Sequence

import pytest
import torch

from tests.trainers.loss_batches import tokens
from trainers.losses import LearnedTokens
from trainers.settings import LossConfig
from trainers.step_metrics import DRIFT_BOUND, Metrics, StepTotals, drift

CPU = torch.device("cpu")


def metrics(
    *batches: LearnedTokens,
    published: int | None = None,
    is_published: bool = True,
    config: LossConfig | None = None,
    clipped: Sequence[torch.Tensor | None] = (None,),
    constrained: Sequence[bool] | None = None,
) -> Metrics:
    totals = StepTotals(
        LossConfig() if config is None else config,
        published=published,
        is_published=is_published,
        device=CPU,
    )
    for batch, held in zip(batches, list(clipped) * len(batches), strict=False):
        count = len(batch.logprobs)
        totals.add(
            batch,
            loss=torch.tensor(0.5),
            entropies=torch.ones(count),
            clipped=held,
            constrained=torch.tensor(
                [False] * count if constrained is None else constrained, dtype=torch.bool
            ),
        )
    return totals.metrics()


def test_means_are_over_the_tokens_of_all_micro_batches() -> None:
    first = tokens([-1.0, -1.0], old=[-1.0 - math.log(2.0), -1.0], rollout=[-1.0, -1.0])
    second = tokens([-1.0], rollout=[-1.0 - math.log(4.0)])
    found = metrics(first, second, clipped=[torch.tensor([True, False]), None])
    assert found["loss"] == 1.0 and found["tokens"] == 3 and found["entropy"] == pytest.approx(1.0)
    assert found["ratio_mean"] == pytest.approx((2 + 1 + 1) / 3)
    assert found["clipped_fraction"] == pytest.approx(1 / 3)
    assert found["importance_mean"] == pytest.approx((0.5 + 1 + 4) / 3)
    assert found["truncated_fraction"] == pytest.approx(1 / 3)
    k3 = (0.5 - 1 + math.log(2.0)) + (4 - 1 - math.log(4.0))
    assert found["rollout_kl"] == pytest.approx(k3 / 3, rel=1e-5)


@pytest.mark.parametrize(("weights", "fraction"), [([1.0, 1.0], 1.0), ([1.0, 1e-9], 0.5), ([3.0, 1.0], 0.8)])
def test_the_effective_sample_is_the_part_of_the_tokens_that_counts(
    weights: list[float], fraction: float
) -> None:
    batch = tokens([-1.0, -1.0], rollout=[-1.0 - math.log(weight) for weight in weights])
    assert metrics(batch)["effective_sample_fraction"] == pytest.approx(fraction, rel=1e-5)


def test_tokens_are_sorted_by_staleness() -> None:
    up = math.log(2.0)
    batch = tokens(
        [-1.0] * 5,
        rollout=[-1.0, -1.0 - up, -1.0, -1.0, -1.0 + up],
        versions=[7, 6, 5, 3, -1],
        lengths=[4, 1],
    )
    found = metrics(batch, published=7)
    assert (found["staleness_mean"], found["staleness_max"]) == ((0 + 1 + 2 + 4) / 4, 4)
    counts = [found[f"tokens_staleness_{bucket}"] for bucket in ("0", "1", "2_plus")]
    assert counts == [1, 1, 2], "the token of an unknown version is in none"
    assert found["importance_mean_staleness_1"] == pytest.approx(2.0)
    assert found["importance_mean_staleness_2_plus"] == pytest.approx(1.0)
    assert found["rollout_kl_staleness_1"] == pytest.approx(2 - 1 - up, rel=1e-5)
    assert found["rollout_kl_staleness_0"] == 0.0


def test_the_engines_are_compared_under_the_same_weights_alone() -> None:
    batch = tokens([-1.0] * 3, rollout=[-1.1, -0.7, -5.0], versions=[7, 7, 6], lengths=[3])
    found = metrics(batch, published=7)
    assert found["logprob_difference_mean"] == pytest.approx(0.2)
    assert found["logprob_difference_max"] == pytest.approx(0.3)
    found = metrics(batch, published=7, constrained=[False, True, False])
    assert found["logprob_difference_max"] == pytest.approx(0.1), "what a grammar constrained is not compared"
    assert found["constrained_fraction"] == pytest.approx(1 / 3)
    for other in (metrics(batch, published=7, is_published=False), metrics(batch, published=8)):
        assert "logprob_difference_mean" not in other
    assert not any("staleness" in name or "difference" in name for name in metrics(batch))


def test_what_was_not_sampled_has_no_metrics_of_rollouts() -> None:
    batch = tokens([-1.0], rollout=[0.0], versions=[7])
    found = metrics(batch, published=7, config=LossConfig(name="sft"))
    assert found.keys() == {"loss", "tokens", "entropy", "ratio_mean", "clipped_fraction"}


def test_no_micro_batch_and_no_token_are_counted_without_dividing_by_zero() -> None:
    assert metrics()["tokens"] == 0
    assert metrics(tokens([], lengths=[0]), published=3)["importance_mean"] == 0.0


def test_engines_that_differ_by_more_than_the_bound_cause_a_warning() -> None:
    found: Metrics = {"step": 4, "logprob_difference_mean": 0.07, "logprob_difference_max": 2.5}
    sentence = drift(found)
    assert sentence is not None and sentence.startswith(
        "step 4: the rollout engine and the trainer differ by 0.0700 on average, and 2.5000 at most"
    )
    assert drift({**found, "logprob_difference_mean": DRIFT_BOUND}) is None and drift({"step": 4}) is None
