"""GSPO: the clipped surrogate of whole answers, whose ratio is the geometric mean of their tokens' ratios.

Zheng et al. 2025, "Group Sequence Policy Optimization", https://arxiv.org/abs/2507.18071. In the form of its
section 4.3, GSPO-token: the same values and gradients where all tokens of an answer have one advantage, and
defined where they have not. The bounds are three orders below those of tokens, because the ratio is a mean.
"""

from trainers.loss_settings import LossConfig
from trainers.losses.clipped import clipped_surrogate
from trainers.losses.interface import LearnedTokens, TokenLosses


def gspo(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """The clipped surrogate of each token, with the ratio of its answer."""
    means = tokens.means_of_answers(tokens.log_ratio.detach())
    # The value is the answer's ratio, the gradient flows through the token's own log-probability.
    ratio = (means + tokens.logprobs - tokens.logprobs.detach()).exp()
    return clipped_surrogate(ratio, tokens, config)
