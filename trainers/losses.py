"""Losses by name, per learned token.

*current* is the policy being optimised, *old* the policy when the step began, *rollout* the engine that
sampled. A loss bounds current / old; `policy_loss` corrects for old / rollout.
"""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from trainers.estimators import DISTILLING
from trainers.settings import DEFAULTS, Aggregation, KlEstimator, LossConfig

MAX_LOG_RATIO = 20.0  # above any clip; avoids overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTokens:
    """A micro-batch's M learned tokens of A completions, contiguous and ordered. A completion may
    have none."""

    logprobs: torch.Tensor  # float32 [M], with gradient
    old_logprobs: torch.Tensor  # float32 [M]
    rollout_logprobs: torch.Tensor  # float32 [M]; the old policy's where a grammar constrained it
    advantages: torch.Tensor  # float32 [M]
    completions: torch.Tensor  # int64 [M], the completion of each token, 0 to A - 1
    lengths: torch.Tensor  # int64 [A], tokens
    versions: torch.Tensor  # int64 [M], the version that sampled the token; -1: unknown
    reference_logprobs: torch.Tensor | None = None  # float32 [M]; None without a KL penalty
    # Of a teacher's K most probable tokens, float32 [M, K]; None without a teacher.
    teacher_logprobs: torch.Tensor | None = None
    logprobs_of_teachers: torch.Tensor | None = None  # the current policy's of these tokens, with gradient

    @property
    def log_ratio(self) -> torch.Tensor:
        """log(current / old) with gradient, float32 [M]."""
        return (self.logprobs - self.old_logprobs).clamp(max=MAX_LOG_RATIO)

    def of_completions(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over completions, [M] -> [A]; 0 for one without tokens."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)

    def means_of_completions(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over each token's completion, [M] -> [M]."""
        return (self.of_completions(values) / self.lengths.clamp(min=1))[self.completions]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """What a loss returns for the M learned tokens of a micro-batch."""

    values: torch.Tensor  # float32 [M], with gradient
    clipped: torch.Tensor | None = None  # bool [M], for metrics: the clip holds the token back


class Loss(Protocol):
    """A loss, built in or your own: a function."""

    def __call__(self, tokens: LearnedTokens, config: LossConfig, /) -> TokenLosses:
        """Losses of tokens, without the weights of `config.aggregation`."""


def policy_loss(tokens: LearnedTokens, config: LossConfig, loss: Loss) -> TokenLosses:
    """loss * min(old / rollout, cap) + `kl_coefficient` * KL(current || reference) for each token."""
    made = loss(tokens, config)
    values = made.values
    if config.importance_cap is not None:
        values = values * importance_weights(tokens, config).clamp(max=config.importance_cap)
    if config.kl_coefficient != 0.0:
        assert tokens.reference_logprobs is not None
        penalty = k3(tokens.logprobs, tokens.reference_logprobs)
        if config.kl_estimator is KlEstimator.K3_UNBIASED:
            penalty = penalty * tokens.log_ratio.exp()
        values = values + config.kl_coefficient * penalty
    return TokenLosses(values=values, clipped=made.clipped)


def token_weights(
    lengths: torch.Tensor, total_tokens: int, sequences: int, config: LossConfig
) -> torch.Tensor:
    """Per token of each completion, float32 [A]. `total_tokens` and `sequences` are the whole batch's."""
    match config.aggregation:
        case Aggregation.TOKEN:
            return torch.full_like(lengths, 1.0 / total_tokens, dtype=torch.float32)
        case Aggregation.SEQUENCE:
            return 1.0 / (lengths.clamp(min=1).float() * sequences)
        case Aggregation.CONSTANT:
            return torch.full_like(lengths, 1.0 / (sequences * config.max_tokens), dtype=torch.float32)


def importance_weights(tokens: LearnedTokens, config: LossConfig) -> torch.Tensor:
    """old / rollout, not truncated, without gradient, float [M].

    IMPALA, https://arxiv.org/abs/1802.01561; between engines: https://fengyao.notion.site/off-policy-rl.
    """
    log_weights = (tokens.old_logprobs - tokens.rollout_logprobs).detach().clamp(max=MAX_LOG_RATIO)
    if config.name == "gspo":  # one weight for an answer
        log_weights = tokens.means_of_completions(log_weights)
    return log_weights.exp()


def k3(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(p || q) for each token sampled from p: q/p - 1 - log(q/p), never negative.
    http://joschu.net/blog/kl-approx.html"""
    log_ratio = (other_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return log_ratio.exp() - 1.0 - log_ratio


def clipped_surrogate(ratio: torch.Tensor, tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """-min(r A, clip(r, 1 - low, 1 + high) A); r is current / old with gradient, float32 [M].

    PPO, https://arxiv.org/abs/1707.06347, equation 7.
    """
    plain = ratio * tokens.advantages
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * tokens.advantages
    return TokenLosses(values=-torch.minimum(plain, clipped), clipped=(clipped < plain).detach())


def ppo_clip(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """The clipped surrogate. GRPO, Dr. GRPO, DAPO and REINFORCE++ differ in `DEFAULTS` and advantages:

    - GRPO, https://arxiv.org/abs/2402.03300, equation 3
    - Dr. GRPO, https://arxiv.org/abs/2503.20783; set `max_tokens` to the longest completion
    - DAPO, https://arxiv.org/abs/2503.14476
    - REINFORCE++, https://arxiv.org/abs/2501.03262
    """
    return clipped_surrogate(tokens.log_ratio.exp(), tokens, config)


def gspo(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """The clipped surrogate with the geometric mean of the completion's ratios.

    GSPO-token, https://arxiv.org/abs/2507.18071, section 4.3.
    """
    means = tokens.means_of_completions(tokens.log_ratio.detach())
    # The value of the completion's ratio, the gradient of the token's log-probability.
    ratio = (means + tokens.logprobs - tokens.logprobs.detach()).exp()
    return clipped_surrogate(ratio, tokens, config)


def cispo(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """-min(r, 1 + high) A log p with a detached weight: no token loses its gradient.

    MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5, with an upper bound only.
    """
    ratio = tokens.log_ratio.detach().exp()
    bound = 1.0 + config.clip_high
    values = -ratio.clamp(max=bound) * tokens.advantages * tokens.logprobs
    return TokenLosses(values=values, clipped=ratio > bound)


def rloo(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """-r A log p with the completion's ratio r, detached and not clipped.

    RLOO, https://arxiv.org/abs/2402.14740: a completion is one action.
    """
    ratios = tokens.of_completions(tokens.log_ratio.detach()).clamp(max=MAX_LOG_RATIO).exp()
    return TokenLosses(values=-ratios[tokens.completions] * tokens.advantages * tokens.logprobs)


def sft(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """-log p, as in a warm start before RL."""
    return TokenLosses(values=-tokens.logprobs)


def divergence(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """The generalised Jensen-Shannon divergence to a teacher, on-policy if the policy has sampled the tokens:
    beta * KL(teacher || m) + (1 - beta) * KL(current || m), m = beta * teacher + (1 - beta) * current.

    GKD, https://arxiv.org/abs/2306.13649, equation 1; its limits at 0 and 1 are the forward and the reverse
    KL. The teacher's top K tokens count each, all others as one with the remaining probability: at most the
    divergence over the whole vocabulary, and equal to it if K is all of it.
    """
    assert tokens.teacher_logprobs is not None and tokens.logprobs_of_teachers is not None
    teacher, current = _with_tail(tokens.teacher_logprobs), _with_tail(tokens.logprobs_of_teachers)
    if config.beta in (0.0, 1.0):
        first, second = (teacher, current) if config.beta == 0.0 else (current, teacher)
        return TokenLosses(values=_kl(first, second))
    mixture = torch.logaddexp(current + math.log1p(-config.beta), teacher + math.log(config.beta))
    return TokenLosses(values=config.beta * _kl(teacher, mixture) + (1 - config.beta) * _kl(current, mixture))


MIN_TAIL = 1e-7  # above float32's rounding of 1 - sum


def _with_tail(logprobs: torch.Tensor) -> torch.Tensor:
    """[M, K] -> [M, K + 1]: the last one is of all other tokens."""
    total = logprobs.logsumexp(-1, keepdim=True).clamp(max=-MIN_TAIL)
    return torch.cat([logprobs, (-torch.expm1(total)).log()], dim=-1)


def _kl(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """[M, K] -> [M]."""
    return (logprobs.exp() * (logprobs - other_logprobs)).sum(-1)


LOSSES: Mapping[str, Loss] = {
    **dict.fromkeys(DEFAULTS, ppo_clip),
    **{"gspo": gspo, "cispo": cispo, "rloo": rloo, "sft": sft},
    **dict.fromkeys(DISTILLING, divergence),
}


def load_loss(config: LossConfig) -> Loss:
    """Raises ValueError if your own loss cannot be imported or fails on three tokens."""
    if config.name in LOSSES:
        return LOSSES[config.name]
    module, _, name = config.name.partition(":")
    try:
        loss: Loss = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the loss {config.name!r} cannot be imported: {error}") from error
    logprobs = torch.tensor([-1.0, -0.5, -2.0])
    tokens = LearnedTokens(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=logprobs,
        rollout_logprobs=logprobs,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        completions=torch.tensor([0, 0, 1]),
        lengths=torch.tensor([2, 1]),
        versions=torch.tensor([0, 0, 0]),
        reference_logprobs=logprobs,
        teacher_logprobs=logprobs[:, None],
        logprobs_of_teachers=logprobs[:, None].clone().requires_grad_(),
    )
    try:
        made = loss(tokens, config)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"the loss {config.name!r} fails on three tokens: {error!r}") from error
    if not isinstance(made, TokenLosses) or made.values.shape != (3,) or not made.values.requires_grad:
        shown = made if not isinstance(made, TokenLosses) else made.values
        raise ValueError(
            f"the loss {config.name!r} must return TokenLosses with one value and its gradient for each of "
            f"3 tokens, got {shown!r}"
        )
    return loss
