"""Losses as a user would write them, right and wrong."""

import torch

from trainers.losses import LearnedTokens, TokenLosses
from trainers.settings import LossConfig

NOT_A_FUNCTION = 3


def plain(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """REINFORCE, times a number from the settings."""
    scale = config.options.get("scale", 1.0)
    assert isinstance(scale, float)
    return TokenLosses(values=-scale * tokens.advantages * tokens.logprobs)


def summed(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    return TokenLosses(values=tokens.logprobs.sum())


def detached(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    return TokenLosses(values=tokens.logprobs.detach())


def bare(tokens: LearnedTokens, config: LossConfig) -> torch.Tensor:
    return tokens.logprobs


def failing(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    raise RuntimeError("the shapes differ")


def one_argument(tokens: LearnedTokens) -> TokenLosses:
    return TokenLosses(values=tokens.logprobs)
