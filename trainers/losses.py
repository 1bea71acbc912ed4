"""The policy loss: PPO's clipped surrogate with truncated importance weights.

It involves three policies. *current* is being optimised, *old* is the trainer's model at the beginning
of the step, and *rollout* is the one that the inference engine sampled from: older weights, and other
kernels even with the same weights. The clip bounds current / old; the truncated importance weight
min(old / rollout, cap) corrects the remaining difference.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch

from trainers.settings import Aggregation, LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The loss of a micro-batch (with gradient), and detached sums over its tokens for metrics; all 0-d."""

    loss: torch.Tensor
    tokens: torch.Tensor
    importance: torch.Tensor  # old / rollout, before the cap
    ratio: torch.Tensor  # current / old
    clipped: torch.Tensor  # tokens without gradient because of the clip
    truncated: torch.Tensor  # tokens whose importance weight exceeds the cap
    rollout_kl: torch.Tensor  # KL(rollout || old)

    @classmethod
    def sums(cls, terms: Iterable[Self]) -> dict[str, float]:
        """Sums over micro-batches, by field name."""
        names = ("loss", "tokens", "importance", "ratio", "clipped", "truncated", "rollout_kl")
        rows = [[float(getattr(term, name).detach()) for name in names] for term in terms]
        return {name: sum(row[i] for row in rows) for i, name in enumerate(names)}


def token_weights(
    counts: torch.Tensor, total_tokens: int, sequences: int, config: LossConfig
) -> torch.Tensor:
    """The weight of each token in the loss, one number per answer; float32 [B].

    Args:
        counts: tokens of each answer of this micro-batch, int64 [B].
        total_tokens: of the batch, over all micro-batches and ranks.
        sequences: answers of the batch, over all micro-batches and ranks.
    """
    match config.aggregation:
        case Aggregation.TOKEN:
            return torch.full_like(counts, 1.0 / total_tokens, dtype=torch.float32)
        case Aggregation.SEQUENCE:
            return 1.0 / (counts.float() * sequences)
        case Aggregation.CONSTANT:
            return torch.full_like(counts, 1.0 / (sequences * config.max_tokens), dtype=torch.float32)


def importance_weights(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """old / rollout, and the same truncated at `cap`; both detached, float [B, T].

    Truncated importance sampling: Espeholt et al. 2018, "IMPALA", https://arxiv.org/abs/1802.01561
    (the rho of V-trace); for the mismatch between rollout and training engines: Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", https://fengyao.notion.site/off-policy-rl.
    """
    # A difference of 20 is far above any cap; a larger one would overflow in the metrics.
    weights = (old_logprobs - rollout_logprobs).detach().clamp(max=20.0).exp()
    return weights, weights.clamp(max=cap)


def k3(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(p || q) for tokens sampled from p: q/p - 1 - log(q/p), never negative.

    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = (other_logprobs - logprobs).clamp(max=20.0)
    return log_ratio.exp() - 1.0 - log_ratio


def policy_loss(
    *,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    config: LossConfig,
    reference_logprobs: torch.Tensor | None = None,
) -> LossTerms:
    """PPO-clip with truncated importance weights, summed with the given token weights.

        loss = - sum_it w_i * min(old/rollout, cap) * min(r A, clip(r, 1 - low, 1 + high) A),  r = current/old

    Schulman et al. 2017, "Proximal Policy Optimization", https://arxiv.org/abs/1707.06347, equation 7.

    Args:
        logprobs: of the current policy, with gradient, [B, T].
        old_logprobs, rollout_logprobs, reference_logprobs: without gradient, [B, T].
        advantages: float [B].
        mask: bool [B, T], true for real tokens.
        weights: float [B], see `token_weights`.
    """
    ratio = (logprobs - old_logprobs).clamp(max=20.0).exp()
    importance, truncated = importance_weights(old_logprobs, rollout_logprobs, config.importance_cap)
    signal = advantages[:, None]
    plain = ratio * signal
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * signal
    per_token = -truncated * torch.minimum(plain, clipped)
    if config.kl_coefficient != 0.0:
        assert reference_logprobs is not None  # Learner checks that there is a reference
        per_token = per_token + config.kl_coefficient * k3(logprobs, reference_logprobs)
    # where, not a product: 0 * inf in a padded column would be NaN.
    per_token = torch.where(mask, per_token, 0.0)

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values.detach().float(), 0.0).sum()

    return LossTerms(
        loss=(per_token * weights[:, None]).sum(),
        tokens=mask.sum(),
        importance=total(importance),
        ratio=total(ratio),
        clipped=total(clipped < plain),
        truncated=total(importance > config.importance_cap),
        rollout_kl=total(k3(rollout_logprobs, old_logprobs)),
    )
