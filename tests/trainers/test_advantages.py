import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.advantages import (
    AdvantageEstimator,
    batch_advantages,
    group_advantages,
    has_signal,
    overlong_penalty,
)

DEVIATION = math.sqrt(14 / 2)  # unbiased


@pytest.mark.parametrize(
    ("estimator", "advantages"),
    [
        (AdvantageEstimator.GRPO, [-2 / DEVIATION, -1 / DEVIATION, 3 / DEVIATION]),
        (AdvantageEstimator.DR_GRPO, [-2.0, -1.0, 3.0]),
        (AdvantageEstimator.RLOO, [1 - 4, 2 - 3.5, 6 - 1.5]),
    ],
)
def test_each_estimator_has_its_formula(estimator: AdvantageEstimator, advantages: list[float]) -> None:
    assert group_advantages([1.0, 2.0, 6.0], estimator) == pytest.approx(advantages, rel=1e-5)


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


def test_reinforce_pp_normalises_over_the_batch() -> None:
    deviation = math.sqrt(((0 - 3) ** 2 + (2 - 3) ** 2 + (4 - 3) ** 2 + (6 - 3) ** 2) / 3)
    first, second, third = batch_advantages([[0.0], [2.0, 4.0], [6.0]], AdvantageEstimator.REINFORCE_PP)
    assert [*first, *second, *third] == pytest.approx([each / deviation for each in (-3, -1, 1, 3)], rel=1e-5)


def test_reinforce_pp_with_a_baseline_subtracts_the_groups_mean_first() -> None:
    groups = [[0.0, 2.0], [100.0, 104.0], [7.0, 7.0]]
    deviation = math.sqrt((1 + 1 + 4 + 4) / 5)
    first, second, third = batch_advantages(groups, AdvantageEstimator.REINFORCE_PP_BASELINE)
    expected = [each / deviation for each in (-1, 1, -2, 2)]
    assert [*first, *second] == pytest.approx(expected, rel=1e-5) and third == [0.0, 0.0]


def test_reinforce_pp_refuses_what_it_cannot_normalise() -> None:
    with pytest.raises(ValueError, match="need a batch of groups: call batch_advantages"):
        group_advantages([1.0, 2.0], AdvantageEstimator.REINFORCE_PP)
    with pytest.raises(ValueError, match="at least 2 rewards, got 1"):
        batch_advantages([[1.0], []], AdvantageEstimator.REINFORCE_PP)
    with pytest.raises(ValueError, match="a group with fewer"):
        batch_advantages([[1.0], [2.0, 3.0]], AdvantageEstimator.REINFORCE_PP_BASELINE)
    with pytest.raises(ValueError, match="finite"):
        batch_advantages([[1.0, math.inf]], AdvantageEstimator.REINFORCE_PP)


def test_a_group_teaches_something_if_its_rewards_differ() -> None:
    assert has_signal([0.0, 0.0, 1.0]) and not has_signal([0.3, 0.3]) and not has_signal([1.0])
    with pytest.raises(ValueError, match="finite"):
        has_signal([math.nan, 1.0])


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_a_completion_near_the_limit_loses_reward(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_tokens=100, buffer_tokens=20) == pytest.approx(penalty)
