"""Advantages: the reward of each answer relative to the other answers to the same prompt."""

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch


class AdvantageEstimator(StrEnum):
    """The formula for advantages; the functions below have the sources."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"


def group_normalised(rewards: torch.Tensor, *, epsilon: float = 1e-6) -> torch.Tensor:
    """(r - mean) / (std + epsilon) within the group; float [G] -> float [G].

    GRPO: Shao et al. 2024, "DeepSeekMath", https://arxiv.org/abs/2402.03300, section 4.1. The
    standard deviation is the unbiased one, as in the authors' code.
    """
    return centred(rewards) / (rewards.std() + epsilon)


def centred(rewards: torch.Tensor) -> torch.Tensor:
    """r - mean within the group; float [G] -> float [G].

    Dr. GRPO: Liu et al. 2025, "Understanding R1-Zero-Like Training", https://arxiv.org/abs/2503.20783:
    dividing by the standard deviation gives more weight to prompts that are nearly always or never solved.
    """
    return rewards - rewards.mean()


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """r minus the mean of the group's other rewards; float [G] -> float [G].

    RLOO: Ahmadian et al. 2024, "Back to Basics", https://arxiv.org/abs/2402.14740.
    """
    count = rewards.shape[0]
    return centred(rewards) * count / (count - 1)


ESTIMATORS: dict[AdvantageEstimator, Callable[[torch.Tensor], torch.Tensor]] = {
    AdvantageEstimator.GRPO: group_normalised,
    AdvantageEstimator.DR_GRPO: centred,
    AdvantageEstimator.RLOO: leave_one_out,
}


def group_advantages(
    rewards: Sequence[float], estimator: AdvantageEstimator = AdvantageEstimator.GRPO
) -> list[float]:
    """Advantages of one group of answers to one prompt; all zero if all rewards are equal.

    Raises:
        ValueError: fewer than two rewards (there is nothing to compare with), or one that is not finite.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group needs at least 2 rewards, got {len(rewards)}")
    group = torch.tensor(rewards, dtype=torch.float64)
    if not bool(torch.isfinite(group).all()):
        raise ValueError(f"rewards must be finite numbers, got {list(rewards)}")
    # Equal rewards differ from their mean by rounding errors, which division by a tiny deviation amplifies.
    if bool((group == group[0]).all()):
        return [0.0] * len(rewards)
    return [float(value) for value in ESTIMATORS[estimator](group)]
