"""The policy loss: PPO's clipped surrogate, corrected for what the rollout engine really sampled.

Three policies are in play. *current* is what is being optimised, *old* is the trainer's model at the
beginning of the step, and *rollout* is what the inference engine sampled from: older weights, and
other kernels even for the same weights. The clip bounds current / old; the truncated importance
weight min(old / rollout, cap) accounts for the rest.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import torch


class Aggregation(StrEnum):
    """What one token counts in the loss of a batch.

    TOKEN: every token of the batch counts the same (DAPO: Yu et al. 2025,
    https://arxiv.org/abs/2503.14476, section 3.3). SEQUENCE: every answer counts the same, whatever
    its length (GRPO: https://arxiv.org/abs/2402.03300). CONSTANT: the sum divided by answers times
    `max_tokens`, so that length does not enter at all (Dr. GRPO: https://arxiv.org/abs/2503.20783).
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    clip_low: float = 0.2
    clip_high: float = 0.2  # DAPO's "clip higher" is 0.28
    importance_cap: float = 2.0
    kl_coefficient: float = 0.0  # 0 switches the reference model off: it is not even loaded
    aggregation: Aggregation = Aggregation.TOKEN
    max_tokens: int = 1024  # for Aggregation.CONSTANT


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The loss of a micro-batch, and sums over its tokens that metrics are made of (detached)."""

    loss: torch.Tensor
    tokens: torch.Tensor
    importance: torch.Tensor  # old / rollout, before the cap
    ratio: torch.Tensor  # current / old
    clipped: torch.Tensor  # tokens whose gradient the clip took away
    truncated: torch.Tensor  # tokens whose importance weight hit the cap
    rollout_kl: torch.Tensor  # KL(rollout || old)

    @classmethod
    def sums(cls, terms: "list[Self]") -> dict[str, float]:
        names = ("loss", "tokens", "importance", "ratio", "clipped", "truncated", "rollout_kl")
        return {name: sum(float(getattr(term, name).detach()) for term in terms) for name in names}


def token_weights(
    counts: torch.Tensor, total_tokens: int, sequences: int, config: LossConfig
) -> torch.Tensor:
    """What each token of each answer counts; float [B], to be spread over the answer's tokens.

    Args:
        counts: tokens of each answer of this micro-batch, [B].
        total_tokens: of the whole batch, over all micro-batches and ranks.
        sequences: answers of the whole batch.
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
    # A difference of 20 is already far above any cap; exp of more overflows into the metrics.
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
        advantages: [B]. mask: bool [B, T], true for real tokens. weights: see `token_weights`, [B].
    """
    ratio = (logprobs - old_logprobs).clamp(max=20.0).exp()
    importance, truncated = importance_weights(old_logprobs, rollout_logprobs, config.importance_cap)
    signal = advantages[:, None]
    plain = ratio * signal
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * signal
    per_token = -truncated * torch.minimum(plain, clipped)
    if config.kl_coefficient != 0.0:
        assert reference_logprobs is not None
        per_token = per_token + config.kl_coefficient * k3(logprobs, reference_logprobs)
    # where, not a product: 0 * inf of a padded column would be NaN.
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
