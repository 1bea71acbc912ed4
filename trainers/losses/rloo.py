"""RLOO: REINFORCE on whole answers; the baseline is the mean reward of the others.

Ahmadian et al. 2024, "Back to Basics", https://arxiv.org/abs/2402.14740. An answer is one action: its
log-probability is the sum over its tokens, and nothing is clipped. Its advantages are
`AdvantageEstimator.RLOO`. After the first of several updates on a batch the answer is weighted with
current / old.
"""

from trainers.loss_settings import LossConfig
from trainers.losses.interface import MAX_LOG_RATIO, LearnedTokens, TokenLosses


def rloo(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """- r A log p for each token, r being the ratio of its answer, without gradient."""
    ratios = tokens.of_answers(tokens.log_ratio.detach()).clamp(max=MAX_LOG_RATIO).exp()
    return TokenLosses(values=-ratios[tokens.answers] * tokens.advantages * tokens.logprobs)
