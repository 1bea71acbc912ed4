"""REINFORCE++: the clipped surrogate on advantages that are normalised over the whole batch.

Hu et al. 2025, "REINFORCE++", https://arxiv.org/abs/2501.03262. Its advantages are
`AdvantageEstimator.REINFORCE_PP`, or `REINFORCE_PP_BASELINE` with several answers to each prompt.
"""

from trainers.loss_settings import LossConfig
from trainers.losses.clipped import clipped_surrogate
from trainers.losses.interface import LearnedTokens, TokenLosses


def reinforce_pp(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """The clipped surrogate of each token."""
    return clipped_surrogate(tokens.log_ratio.exp(), tokens, config)
