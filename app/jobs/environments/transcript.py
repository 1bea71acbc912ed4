"""Conversations as tokens: only new messages are rendered."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from app.client.completions import Answer
from trainers.trajectory import Trajectory, VersionSpan

Message = dict[str, Any]  # "role" and "content"
WORDS = ("1", "2")  # equally many tokens


def probes(told: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Two conversations with different assistant's words and these last messages, for `between`."""
    first, second = (
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": word}, *told] for word in WORDS
    )
    return first, second


def between(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The tokens that follow the assistant's word in both renderings.

    Raises:
        ValueError: the chat template rewrites earlier messages.
    """
    pairs = zip(reversed(first), reversed(second), strict=False)
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    head = len(first) - common - 1
    if common == 0 or head < 0 or len(first) != len(second) or first[:head] != second[:head]:
        raise ValueError(
            "a conversation of several turns needs a chat template that writes each message after the one "
            f"before; the model's renders {len(first)} and {len(second)} tokens for two conversations that "
            "differ in one word, with other differences too"
        )
    return list(first[len(first) - common :])


@dataclass
class Transcript:
    prompt_token_ids: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    constrained: list[bool] = field(default_factory=list)
    _spans: list[VersionSpan] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The next turn's prompt."""
        return [*self.prompt_token_ids, *self.token_ids]

    def append_answer(self, answer: Answer, *, constrained: bool = False) -> None:
        """Append sampled tokens; `constrained`: by a grammar."""
        start = len(self.token_ids)
        self._spans += [
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
            for span in answer.trained_versions
        ]
        self._append(answer.token_ids, answer.logprobs, sampled=True, constrained=constrained)

    def append_messages(self, token_ids: Sequence[int]) -> None:
        """Append the result of `between`. The model may have sampled its first token, which ends the turn."""
        if self.token_ids and token_ids and self.token_ids[-1] == token_ids[0]:
            token_ids = token_ids[1:]
        self.append_masked(token_ids)

    def append_masked(self, token_ids: Sequence[int]) -> None:
        self._append(token_ids, [0.0] * len(token_ids), sampled=False, constrained=False)

    def _append(
        self, token_ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool, constrained: bool
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.mask += [sampled] * len(token_ids)
        self.constrained += [constrained] * len(token_ids)

    def trajectory(self) -> Trajectory:
        """The conversation up to the last sampled token, without an advantage."""
        end = max((i + 1 for i, sampled in enumerate(self.mask) if sampled), default=0)
        return Trajectory(
            prompt_token_ids=tuple(self.prompt_token_ids),
            token_ids=tuple(self.token_ids[:end]),
            logprobs=tuple(self.logprobs[:end]),
            advantage=0.0,
            weight_versions=tuple(self._spans),
            loss_mask=tuple(self.mask[:end]),
            constrained=tuple(self.constrained[:end]) if any(self.constrained) else None,
        )
