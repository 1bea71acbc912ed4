"""For losses of your own, and for programs that send trajectories to the trainer deployment.

    from slipstream.training import LearnedTokens, LossConfig, TokenLosses

    def loss(tokens: LearnedTokens, config: LossConfig) -> TokenLosses: ...

`docs/guides/losses.md` says what a loss gets and returns, and how the trainer finds it.
"""

from trainers.losses import LearnedTokens, TokenLosses
from trainers.settings import LossConfig
from trainers.trajectory import RoutedExperts, Trajectory
from trainers.trajectory_arrays import MEDIA_TYPE, to_bytes

__all__ = [
    "MEDIA_TYPE",
    "LearnedTokens",
    "LossConfig",
    "RoutedExperts",
    "TokenLosses",
    "Trajectory",
    "to_bytes",
]
