"""CISPO: REINFORCE whose importance weight is truncated, so that no token loses its gradient.

MiniMax 2025, "MiniMax-M1", https://arxiv.org/abs/2506.13585, equations 4 and 5. The weight has an upper bound
alone, 1 + clip_high, as in their experiments.
"""

from trainers.loss_settings import LossConfig
from trainers.losses.interface import LearnedTokens, TokenLosses


def cispo(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """- min(r, 1 + high) A log p for each token; the weight carries no gradient."""
    ratio = tokens.log_ratio.detach().exp()
    bound = 1.0 + config.clip_high
    values = -ratio.clamp(max=bound) * tokens.advantages * tokens.logprobs
    return TokenLosses(values=values, clipped=ratio > bound)
