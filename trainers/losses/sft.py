"""Supervised fine-tuning: the negative log-likelihood of the learned tokens, such as a warm start before RL.

Advantages and rollout log-probabilities are not read: a trajectory may have zeros there.
"""

from trainers.loss_settings import LossConfig
from trainers.losses.interface import LearnedTokens, TokenLosses


def sft(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """- log p for each token."""
    return TokenLosses(values=-tokens.logprobs)
