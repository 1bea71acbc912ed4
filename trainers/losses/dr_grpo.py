"""Dr. GRPO: the clipped surrogate, summed and divided by a constant, so that long answers are not favoured.

Liu et al. 2025, "Understanding R1-Zero-Like Training", https://arxiv.org/abs/2503.20783. Its advantages are
`AdvantageEstimator.DR_GRPO`. Set `max_tokens` to the longest answer that is sampled.
"""

from trainers.loss_settings import LossConfig
from trainers.losses.clipped import clipped_surrogate
from trainers.losses.interface import LearnedTokens, TokenLosses


def dr_grpo(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """The clipped surrogate of each token."""
    return clipped_surrogate(tokens.log_ratio.exp(), tokens, config)
