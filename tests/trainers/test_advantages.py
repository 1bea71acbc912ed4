import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.advantages import AdvantageEstimator, group_advantages

REWARDS = st.lists(st.floats(min_value=-100, max_value=100), min_size=2, max_size=16)


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    advantages = group_advantages([0.0, 0.0, 1.0, 1.0])
    deviation = math.sqrt(4 * 0.25 / 3)
    assert advantages == pytest.approx(
        [-0.5 / deviation, -0.5 / deviation, 0.5 / deviation, 0.5 / deviation], rel=1e-5
    )


def test_dr_grpo_only_centres() -> None:
    assert group_advantages([1.0, 2.0, 6.0], AdvantageEstimator.DR_GRPO) == pytest.approx([-2.0, -1.0, 3.0])


def test_rloo_compares_with_the_others() -> None:
    assert group_advantages([1.0, 2.0, 6.0], AdvantageEstimator.RLOO) == pytest.approx(
        [1 - 4, 2 - 3.5, 6 - 1.5]
    )


@settings(deadline=None)  # other processes share the cores
@given(REWARDS, st.sampled_from(AdvantageEstimator))
def test_advantages_of_a_group_sum_to_zero_and_the_best_answer_has_the_highest(
    rewards: list[float], estimator: AdvantageEstimator
) -> None:
    advantages = group_advantages(rewards, estimator)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    best = max(range(len(rewards)), key=lambda i: rewards[i])
    assert advantages[best] == max(advantages)


@settings(deadline=None)  # other processes share the cores
@given(st.floats(min_value=-1e6, max_value=1e6), st.integers(2, 9))
def test_equal_rewards_have_no_advantage(reward: float, count: int) -> None:
    assert group_advantages([reward] * count) == [0.0] * count


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 rewards, got 1"):
        group_advantages([1.0])


def test_a_reward_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")])
