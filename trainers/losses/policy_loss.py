"""What all losses have in common: importance weights, the KL penalty, and the weights of tokens."""

import torch

from trainers.loss_settings import Aggregation, ImportanceLevel, KlEstimator, LossConfig
from trainers.losses.interface import MAX_LOG_RATIO, LearnedTokens, Loss, TokenLosses


def policy_loss(tokens: LearnedTokens, config: LossConfig, loss: Loss) -> TokenLosses:
    """The loss of each token, times min(old / rollout, cap), plus the KL penalty.

    The penalty is `kl_coefficient` * KL(current || reference), estimated for each token.
    """
    made = loss(tokens, config)
    values = made.values
    if config.importance_cap is not None:
        values = values * importance_weights(tokens, config).clamp(max=config.importance_cap)
    if config.kl_coefficient != 0.0:
        assert tokens.reference_logprobs is not None  # Learner checks that there is a reference
        penalty = k3(tokens.logprobs, tokens.reference_logprobs)
        if config.kl_estimator is KlEstimator.K3_UNBIASED:
            penalty = penalty * tokens.log_ratio.exp()
        values = values + config.kl_coefficient * penalty
    return TokenLosses(values=values, clipped=made.clipped)


def token_weights(
    lengths: torch.Tensor, total_tokens: int, sequences: int, config: LossConfig
) -> torch.Tensor:
    """The weight of each token in the loss, one number per answer; float32 [A].

    Args:
        lengths: learned tokens of each answer of this micro-batch, int64 [A].
        total_tokens: of the batch, over all micro-batches and ranks.
        sequences: answers of the batch, over all micro-batches and ranks.
    """
    match config.aggregation:
        case Aggregation.TOKEN:
            return torch.full_like(lengths, 1.0 / total_tokens, dtype=torch.float32)
        case Aggregation.SEQUENCE:
            return 1.0 / (lengths.clamp(min=1).float() * sequences)
        case Aggregation.CONSTANT:
            return torch.full_like(lengths, 1.0 / (sequences * config.max_tokens), dtype=torch.float32)


def importance_weights(tokens: LearnedTokens, config: LossConfig) -> torch.Tensor:
    """old / rollout at the level that is configured, not truncated, without gradient; float [M].

    Truncated importance sampling: Espeholt et al. 2018, "IMPALA", https://arxiv.org/abs/1802.01561
    (the rho of V-trace); for the mismatch between rollout and training engines: Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", https://fengyao.notion.site/off-policy-rl.
    """
    log_weights = (tokens.old_logprobs - tokens.rollout_logprobs).detach().clamp(max=MAX_LOG_RATIO)
    if config.importance_level is ImportanceLevel.ANSWER:
        log_weights = tokens.means_of_answers(log_weights)
    return log_weights.exp()


def k3(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(p || q) for tokens sampled from p: q/p - 1 - log(q/p), never negative.

    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = (other_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return log_ratio.exp() - 1.0 - log_ratio
