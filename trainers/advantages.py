"""Advantages, and the penalty for length."""

from collections.abc import Callable, Sequence

import torch

from trainers.estimators import AdvantageEstimator


def group_normalised(rewards: torch.Tensor) -> torch.Tensor:
    """(r - mean) / (std + 1e-6), float [G] -> float [G].

    GRPO, https://arxiv.org/abs/2402.03300, section 4.1, with the unbiased deviation of the authors' code.
    """
    return centred(rewards) / (rewards.std() + 1e-6)


def centred(rewards: torch.Tensor) -> torch.Tensor:
    """r - mean, float [G] -> float [G]. Dr. GRPO, https://arxiv.org/abs/2503.20783."""
    return rewards - rewards.mean()


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """r minus the mean of the other rewards, float [G] -> float [G]. RLOO,
    https://arxiv.org/abs/2402.14740."""
    count = rewards.shape[0]
    return centred(rewards) * count / (count - 1)


ESTIMATORS: dict[AdvantageEstimator, Callable[[torch.Tensor], torch.Tensor]] = {
    AdvantageEstimator.GRPO: group_normalised,
    AdvantageEstimator.DR_GRPO: centred,
    AdvantageEstimator.RLOO: leave_one_out,
}


OF_BATCHES = frozenset({AdvantageEstimator.REINFORCE_PP, AdvantageEstimator.REINFORCE_PP_BASELINE})


def group_advantages(
    rewards: Sequence[float], estimator: AdvantageEstimator = AdvantageEstimator.GRPO
) -> list[float]:
    """Advantages of one group; zeros if its rewards are equal. Raises ValueError for fewer than two rewards,
    one that is not finite, or an estimator of batches."""
    if estimator in OF_BATCHES:
        raise ValueError(f"advantages {estimator.value!r} need a batch of groups: call batch_advantages")
    if len(rewards) < 2:
        raise ValueError(f"a group needs at least 2 rewards, got {len(rewards)}")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    return [float(value) for value in ESTIMATORS[estimator](_finite(rewards))]


def batch_advantages(
    groups: Sequence[Sequence[float]], estimator: AdvantageEstimator = AdvantageEstimator.GRPO
) -> list[list[float]]:
    """By group. REINFORCE++ (https://arxiv.org/abs/2501.03262) normalises over the batch; its baseline
    variant first subtracts group means. Raises ValueError."""
    if estimator not in OF_BATCHES:
        return [group_advantages(rewards, estimator) for rewards in groups]
    rewards = [_finite(group) for group in groups]
    if sum(len(group) for group in rewards) < 2:
        raise ValueError(f"a batch needs at least 2 rewards, got {sum(len(group) for group in rewards)}")
    if estimator is AdvantageEstimator.REINFORCE_PP_BASELINE:
        if any(len(group) < 2 for group in rewards):
            raise ValueError("a group needs at least 2 rewards for a baseline, got a group with fewer")
        # Exact zeros without signal.
        rewards = [centred(group) if has_signal(group.tolist()) else group * 0.0 for group in rewards]
    values = torch.cat(rewards)
    if not has_signal(values.tolist()):
        return [[0.0] * len(group) for group in rewards]
    parts = group_normalised(values).split([len(group) for group in rewards])
    return [part.tolist() for part in parts]


def has_signal(rewards: Sequence[float]) -> bool:
    """Raises ValueError for a reward that is not finite."""
    # Not by the deviation: rounding makes it nonzero for equal rewards.
    group = _finite(rewards)
    return len(group) > 0 and not bool((group == group[0]).all())


def overlong_penalty(length: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """0.0 up to max_tokens - buffer_tokens, then linearly to -1.0 at max_tokens. DAPO,
    https://arxiv.org/abs/2503.14476, equation 13."""
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must lie in [1, {max_tokens}], got {buffer_tokens}")
    excess = length - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, excess / buffer_tokens))


def _finite(rewards: Sequence[float]) -> torch.Tensor:
    """float64 [G]."""
    values = torch.tensor(rewards, dtype=torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"rewards must be finite numbers, got {list(rewards)}")
    return values
