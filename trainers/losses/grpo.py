"""GRPO: the clipped surrogate, averaged over the tokens of each answer, then over answers.

Shao et al. 2024, "DeepSeekMath", https://arxiv.org/abs/2402.03300, equation 3. Its advantages are
`AdvantageEstimator.GRPO`, and its KL penalty is `kl_coefficient`.
"""

from trainers.loss_settings import LossConfig
from trainers.losses.clipped import clipped_surrogate
from trainers.losses.interface import LearnedTokens, TokenLosses


def grpo(tokens: LearnedTokens, config: LossConfig) -> TokenLosses:
    """The clipped surrogate of each token."""
    return clipped_surrogate(tokens.log_ratio.exp(), tokens, config)
