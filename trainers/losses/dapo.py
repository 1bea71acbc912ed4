"""DAPO: the clipped surrogate with a higher upper bound, averaged over all tokens of the batch.

Yu et al. 2025, "DAPO", https://arxiv.org/abs/2503.14476. Clip higher: tokens that were unlikely may grow.
Dynamic sampling and overlong shaping come before the loss: `has_signal` and `overlong_penalty` in
`trainers.advantages`.
"""

from trainers.loss_settings import LossConfig
from trainers.losses.clipped import clipped_surrogate
from trainers.losses.interface import LearnedTokens, TokenLosses


def dapo(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """The clipped surrogate of each token."""
    return clipped_surrogate(tokens.log_ratio.exp(), tokens, config)
