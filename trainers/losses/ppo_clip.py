"""PPO's clipped surrogate with settings of your choice; all tokens weigh the same by default.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", https://arxiv.org/abs/1707.06347.
"""

from trainers.loss_settings import LossConfig
from trainers.losses.clipped import clipped_surrogate
from trainers.losses.interface import LearnedTokens, TokenLosses


def ppo_clip(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """The clipped surrogate of each token."""
    return clipped_surrogate(tokens.log_ratio.exp(), tokens, config)
