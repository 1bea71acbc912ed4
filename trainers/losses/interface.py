"""What a loss is given, and what it returns.

Three policies take part. *current* is being optimised, *old* is the trainer's model at the beginning of the
step, and *rollout* is the one that the inference engine sampled from: older weights, and other kernels even
with the same weights. A loss bounds current / old; `trainers.losses.policy_loss` corrects for old / rollout.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from trainers.loss_settings import LossConfig

MAX_LOG_RATIO = 20.0  # far above any clip; a larger one would overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTokens:
    """The M tokens of a micro-batch that are learned from, of A answers.

    Masked and padded tokens are not among them. The tokens of an answer are contiguous and in order, and all
    of them are in the same micro-batch; an answer may have none.
    """

    logprobs: torch.Tensor  # of the current policy, with gradient, float32 [M]
    old_logprobs: torch.Tensor  # float32 [M]
    rollout_logprobs: torch.Tensor  # float32 [M]; the old policy's where a grammar constrained the choice
    advantages: torch.Tensor  # float32 [M]
    answers: torch.Tensor  # int64 [M]: the answer of each token, 0 to A - 1
    lengths: torch.Tensor  # int64 [A]: tokens of each answer
    versions: torch.Tensor  # int64 [M]: of the weights that sampled the token; -1: unknown
    reference_logprobs: torch.Tensor | None = None  # float32 [M]; None if kl_coefficient is 0

    @property
    def log_ratio(self) -> torch.Tensor:
        """log(current / old) with gradient, float32 [M]."""
        return (self.logprobs - self.old_logprobs).clamp(max=MAX_LOG_RATIO)

    def of_answers(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values`, [M], over each answer, [A]; 0 for one without tokens."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)

    def means_of_answers(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the mean of `values`, [M], over its answer, [M]."""
        return (self.of_answers(values) / self.lengths.clamp(min=1))[self.answers]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """What a loss returns."""

    values: torch.Tensor  # with gradient, float32 [M]; the lower, the better
    clipped: torch.Tensor | None = None  # bool [M], for the metrics: the clip holds the token back


class Loss(Protocol):
    """A loss, built in or a user's own: a plain function."""

    def __call__(self, tokens: LearnedTokens, config: LossConfig, /) -> TokenLosses:
        """The loss of each token. How tokens are weighted against each other is `config.aggregation`'s."""
