"""Environments: prompts, replies and rewards.

    Task           one prompt, `count` answers
    Conversations  `count` concurrent conversations, each a session of the fleet

Your own environment of several turns is a `TurnEnvironment`; its tools run in `Conversation.reply`.
"""

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

from app.client.completions import Answer
from app.client.connection import FleetError
from app.jobs.groups import Rollout
from app.jobs.policy import Policy, Unanswered, is_too_long
from app.jobs.rewards import checked
from app.jobs.task_groups import all_of
from app.jobs.user_code import blamed

Message = dict[str, Any]  # "role" and "content"
WORDS = ("1", "2")  # the same number of tokens each
NO_ANSWER = Answer(text="", token_ids=[], logprobs=[], weight_versions=[], finish_reason="stop")
MAX_SAID = 4000  # characters per message, which may have images
HELD_OUT = 1 << 39  # later problems are for evaluation only
AT_ONCE = 16  # per request, whose cost is constant


class Environment(ABC):
    @property
    def problems(self) -> int:
        return sys.maxsize

    def running(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    @abstractmethod
    async def sample(self) -> str:
        """For `--dry-run`; does not ask the fleet."""

    @abstractmethod
    async def rollouts(self, number: int, count: int, policy: Policy) -> Sequence[Rollout]:
        """`count` rollouts of this problem; a number means the same problem in every process. Raises as
        `Policy.chat`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What follows the model's turn.

    Attributes:
        messages: for its next turn, of users or tools; not learned from.
        reward: added to the rollout's.
    """

    messages: Sequence[Message] = field(default_factory=tuple)
    reward: float = 0.0
    done: bool = False


class Conversation(Protocol):
    """One attempt at a problem."""

    @property
    def messages(self) -> Sequence[Message]:
        """The first messages."""

    async def reply(self, answer: str) -> Reply:
        """Run tools, and reply to the model's turn."""


class TurnEnvironment(Protocol):
    """Problems that take several turns."""

    def start(self, number: int) -> Conversation:
        """A new attempt at this problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    messages: list[Message]
    entry: Mapping[str, Any]  # reasoning-gym's, or a line of the file
    source: str = ""  # the data set


class Task(Environment):
    @abstractmethod
    def problem(self, number: int) -> Problem:
        """The same for the same number, in every process."""

    @abstractmethod
    async def score(self, problem: Problem, answer: Answer) -> float:
        """Raises Unanswered: there is no reward."""

    async def sample(self) -> str:
        problem = self.problem(0)
        reward = await self.score(problem, NO_ANSWER)
        return f"the first problem: {_said(problem.messages)}\nits reward for an empty answer: {reward:g}"

    async def rollouts(self, number: int, count: int, policy: Policy) -> Sequence[Rollout]:
        problem = self.problem(number)
        shares = [min(AT_ONCE, count - begun) for begun in range(0, count, AT_ONCE)]
        made = await all_of(self._rollouts(problem, share, policy) for share in shares)
        return [rollout for share in made for rollout in share]

    async def _rollouts(self, problem: Problem, count: int, policy: Policy) -> list[Rollout]:
        attempts = [policy.attempt() for _ in range(count)]
        answers = await policy.chat(problem.messages, attempts)
        return await all_of(self._rollout(problem, *each) for each in zip(attempts, answers, strict=True))

    async def _rollout(self, problem: Problem, attempt: str, answer: Answer) -> Rollout:
        return Rollout(
            id=attempt,
            reward=await self.score(problem, answer),
            text=answer.text,
            tokens=len(answer.token_ids),
            cut=answer.finish_reason == "length",
            source=problem.source,
        )


@dataclass(frozen=True, slots=True)
class Conversations(Environment):
    environment: TurnEnvironment
    max_turns: int
    reply_timeout_s: float = 600.0  # includes tools

    async def sample(self) -> str:
        with blamed("the environment"):
            return f"the first conversation: {_said(self.environment.start(0).messages)}"

    async def rollouts(self, number: int, count: int, policy: Policy) -> Sequence[Rollout]:
        return await all_of(self._rollout(number, policy) for _ in range(count))

    async def _rollout(self, number: int, policy: Policy) -> Rollout:
        with blamed("the environment"):
            conversation = self.environment.start(number)
        tokens, attempt = await policy.tokenize(conversation.messages), policy.attempt()
        reward, texts, sampled, cut = 0.0, [], 0, False
        for turn in range(1, self.max_turns + 1):
            try:
                answer = await policy.complete(tokens, attempt)
            except FleetError as error:
                if not is_too_long(error):
                    raise
                if turn == 1:
                    raise Unanswered(error.message) from error
                break
            tokens += answer.token_ids
            sampled += len(answer.token_ids)
            texts.append(answer.text)
            cut = cut or answer.finish_reason == "length"
            reply = await self._reply(conversation, answer.text)
            reward += checked(reply.reward, "the environment")
            if reply.done or turn == self.max_turns:
                break
            first, second = probes(reply.messages)
            told = between(await policy.tokenize(first), await policy.tokenize(second))
            # The model may have sampled its first token, which ends the turn.
            tokens += told[1:] if told and told[0] == tokens[-1] else told
        return Rollout(
            id=attempt,
            reward=reward,
            text=" | ".join(texts),
            tokens=sampled,
            cut=cut,
            turns=len(texts),
        )

    async def _reply(self, conversation: Conversation, answer: str) -> Reply:
        try:
            async with asyncio.timeout(self.reply_timeout_s):
                with blamed("the environment"):
                    return await conversation.reply(answer)
        except TimeoutError:
            raise Unanswered(f"the environment's reply took longer than {self.reply_timeout_s:g} s") from None


def probes(told: Sequence[Message]) -> tuple[list[Message], list[Message]]:
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


def _said(messages: Sequence[Message]) -> str:
    return " | ".join(f"{each['role']}: {str(each.get('content'))[:MAX_SAID]}" for each in messages)
