"""A conversation as tokens: what the model sampled stays as it was sampled, and the rest is put between.

    prompt | sampled | what the chat template writes between | sampled | ...
             learned    masked                                 learned

A text that is tokenized again may give other tokens than those that were sampled, and then log-probabilities
and learning are about other tokens. So a next turn's prompt is the tokens so far and the tokens of the new
messages. Those are found by rendering two short conversations that differ in one assistant's word alone: what
follows this word is the same in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from app.client.completions import Answer
from app.jobs.attempts import Sample
from app.jobs.tasks import Message
from trainers.trajectory import VersionSpan

WORDS = ("1", "2")  # each is one token, or at least as many as the other


def probes(told: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Two conversations that end with the new messages, see `between`."""
    first, second = (
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": word},
            *told,
        ]
        for word in WORDS
    )
    return first, second


def between(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The tokens that follow the assistant's word in both renderings.

    Raises:
        ValueError: the chat template does not only append, so that no conversation can be continued.
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
    """The tokens of a conversation, which only grow."""

    prompt_token_ids: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    constrained: list[bool] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    _spans: list[VersionSpan] = field(default_factory=list)

    @property
    def seen(self) -> list[int]:
        """The next turn's prompt."""
        return [*self.prompt_token_ids, *self.token_ids]

    def said(self, answer: Answer, *, constrained: bool = False) -> None:
        """Append what the model said; `constrained`: a grammar left it fewer tokens to choose from."""
        start = len(self.token_ids)
        self._spans += [
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
            for span in answer.trained_versions
        ]
        self.token_ids += answer.token_ids
        self.logprobs += answer.logprobs
        self.mask += [True] * len(answer.token_ids)
        self.constrained += [constrained] * len(answer.token_ids)
        self.answers.append(answer)

    def told(self, token_ids: Sequence[int]) -> None:
        """Append what `between` found: it begins with the end of the turn, which the model may have said."""
        if self.token_ids and token_ids and self.token_ids[-1] == token_ids[0]:
            token_ids = token_ids[1:]
        self.inserted(token_ids)

    def inserted(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the model did not say."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.mask += [False] * len(token_ids)
        self.constrained += [False] * len(token_ids)

    def sample(self) -> Sample:
        """The whole conversation; it ends with what the model said last."""
        end = max((i + 1 for i, mine in enumerate(self.mask) if mine), default=0)
        return Sample(
            prompt_token_ids=tuple(self.prompt_token_ids),
            token_ids=tuple(self.token_ids[:end]),
            logprobs=tuple(self.logprobs[:end]),
            weight_versions=tuple(self._spans),
            oldest_version=min(answer.oldest_version for answer in self.answers),
            newest_version=max(answer.newest_version for answer in self.answers),
            loss_mask=tuple(self.mask[:end]),
            constrained=tuple(self.constrained[:end]) if any(self.constrained) else None,
        )
