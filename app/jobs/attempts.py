"""Attempts at a problem: what the model said over one or more turns, and the reward.

    attempt ── samples ──► trajectories, one for each sample, all with the attempt's advantage

A sample is a prompt and the tokens after it as the engine saw them. Turns of one conversation are one sample:
what tools and users said in between is part of the tokens, and masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from app.client.completions import Answer
from trainers.trajectory import Trajectory, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Tokens that the trainer sees."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]  # of `token_ids`; 0.0 where the mask is false
    weight_versions: Sequence[VersionSpan]  # of each sampled token; the adapter's where one answered
    oldest_version: int  # of these
    newest_version: int
    loss_mask: Sequence[bool] | None = None  # of `token_ids`: whether the model said it; None: all
    constrained: Sequence[bool] | None = None  # of `token_ids`; see `Trajectory`

    @property
    def sampled_tokens(self) -> int:
        """How many of its tokens the model said."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)

    def trajectory(self, advantage: float) -> Trajectory:
        """What the trainer learns from."""
        return Trajectory(
            prompt_token_ids=tuple(self.prompt_token_ids),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            advantage=advantage,
            weight_versions=tuple(self.weight_versions),
            loss_mask=None if self.loss_mask is None else tuple(self.loss_mask),
            constrained=None if self.constrained is None else tuple(self.constrained),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a problem.

    Attributes:
        reward: the task's own.
        penalty: added to the reward before advantages, 0.0 or less; see `overlong_penalty`.
        text: what the model said, for a person.
    """

    samples: Sequence[Sample]
    reward: float
    text: str
    penalty: float = 0.0

    @property
    def sampled_tokens(self) -> int:
        return sum(sample.sampled_tokens for sample in self.samples)

    @classmethod
    def of_answer(cls, prompt_token_ids: Sequence[int], answer: Answer, reward: float) -> Self:
        """An attempt of one turn."""
        sample = Sample(
            prompt_token_ids=prompt_token_ids,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            weight_versions=answer.trained_versions,
            oldest_version=answer.oldest_version,
            newest_version=answer.newest_version,
        )
        return cls(samples=[sample], reward=reward, text=answer.text)
