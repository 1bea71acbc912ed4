"""The clipped surrogate, which most of these losses share."""

import torch

from trainers.loss_settings import LossConfig
from trainers.losses.interface import LearnedTokens, TokenLosses


def clipped_surrogate(ratio: torch.Tensor, tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """- min(r A, clip(r, 1 - low, 1 + high) A) for each token.

    Schulman et al. 2017, "Proximal Policy Optimization", https://arxiv.org/abs/1707.06347, equation 7.

    Args:
        ratio: r, current / old with gradient, float32 [M].
    """
    plain = ratio * tokens.advantages
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * tokens.advantages
    return TokenLosses(values=-torch.minimum(plain, clipped), clipped=(clipped < plain).detach())
