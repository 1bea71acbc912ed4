"""Environments: what a model is asked, what it is told in between, and the reward.

    Environment.attempts(number, count) ──► attempts at one problem
        Single         one prompt, `count` answers in one request, scored by a task
        Conversations  `count` conversations beside each other, each a session of the fleet

A user's environment of several turns is a `TurnEnvironment`: it starts a conversation, and replies to what
the model says until it is done. Tools run there.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol, TypeVar

from app.client.completions import Answer
from app.client.connection import FleetError
from app.jobs.attempts import Attempt, Sample
from app.jobs.own_code import blamed, imported
from app.jobs.rollouts import Policy, Unanswered
from app.jobs.tasks import Message, Task, checked
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


T = TypeVar("T")
HELD_OUT = 1 << 39  # problems of evaluations have numbers from here on
BUILT_IN = {"calculator": "app.jobs.environments.calculator:Calculator"}


class Environment(Protocol):
    """A source of problems that the model attempts."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """What it needs, while the block runs; nothing is attempted outside of it."""

    async def attempts(self, number: int, count: int, policy: Policy) -> Sequence[Attempt]:
        """`count` attempts at this problem, which is the same for the same number in every process.

        Raises:
            Unanswered: the fleet does not answer this problem.
            Moved: the policy's version is not served any more.
            FleetError: the fleet refuses.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What comes after something that the model said.

    Attributes:
        messages: for its next turn, of users or tools; not learned from.
        reward: added to that of the attempt.
    """

    messages: Sequence[Message] = field(default_factory=tuple)
    reward: float = 0.0
    done: bool = False


class Conversation(Protocol):
    """One attempt of several turns."""

    @property
    def messages(self) -> Sequence[Message]:
        """Those that it begins with."""

    async def reply(self, answer: str) -> Reply:
        """Carry out what the model said."""


class TurnEnvironment(Protocol):
    """Conversations about problems."""

    def start(self, number: int) -> Conversation:
        """A new attempt at this problem."""


@dataclass(frozen=True, slots=True)
class Single:
    """The environment of a task: one prompt, one answer."""

    task: Task

    def running(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def attempts(self, number: int, count: int, policy: Policy) -> Sequence[Attempt]:
        problem = self.task.problem(number)
        completion = await policy.answers(problem.messages, count)
        return [
            Attempt.of_answer(
                completion.prompt_token_ids, answer, reward=self.task.score(problem, answer.text)
            )
            for answer in completion.answers
        ]


@dataclass(frozen=True, slots=True)
class Conversations:
    """The environment of conversations of at most `max_turns` turns."""

    environment: TurnEnvironment
    max_turns: int
    reply_timeout_s: float = 600.0  # of one reply, with its tools

    def running(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def attempts(self, number: int, count: int, policy: Policy) -> Sequence[Attempt]:
        return await all_of(self._attempt(number, policy) for _ in range(count))

    async def _attempt(self, number: int, policy: Policy) -> Attempt:
        with blamed("the environment"):
            conversation = self.environment.start(number)
        transcript = Transcript(await policy.tokenize(conversation.messages))
        session = uuid.uuid4().hex
        reward, said = 0.0, []
        for turn in range(1, self.max_turns + 1):
            try:
                answer = await policy.turn(transcript.seen, session)
            except FleetError as error:
                if turn == 1 or error.status != 400:
                    raise
                break  # the conversation has become longer than the engine takes
            transcript.said(answer)
            said.append(answer.text)
            reply = await self._reply(conversation, answer.text)
            reward += checked(reply.reward, "the environment")
            if reply.done or turn == self.max_turns:
                break
            first, second = probes(reply.messages)
            told = between(await policy.tokenize(first), await policy.tokenize(second))
            transcript.told(told)
        return Attempt(samples=[transcript.sample()], reward=reward, text=" | ".join(said))

    async def _reply(self, conversation: Conversation, answer: str) -> Reply:
        try:
            async with asyncio.timeout(self.reply_timeout_s):
                with blamed("the environment"):
                    return await conversation.reply(answer)
        except TimeoutError:
            raise Unanswered(f"the environment's reply took longer than {self.reply_timeout_s:g} s") from None


@asynccontextmanager
async def running(environments: Iterable[Environment]) -> AsyncIterator[None]:
    """What these need, while the block runs; one that is there twice is started once."""
    async with AsyncExitStack() as stack:
        for environment in {id(each): each for each in environments}.values():
            await stack.enter_async_context(environment.running())
        yield


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order, done at once; when one fails the others are cancelled.

    Raises:
        Exception: what the first one raised that failed.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def load_environment(path: str, settings: Mapping[str, Any]) -> TurnEnvironment:
    """A built-in environment, or one by its import path, `package.module:factory`.

    Args:
        settings: arguments of the factory, by name.

    Raises:
        ValueError: no such module or factory, or one that refuses the settings or makes no `start`.
    """
    expected = f"package.module:factory, or be one of {[*BUILT_IN, 'verifiers']}"
    factory = imported(BUILT_IN.get(path, path), "--environment", expected)
    try:
        made: TurnEnvironment = factory(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--environment {path!r} refuses {dict(settings)}: {error}") from error
    if not callable(getattr(made, "start", None)):
        raise ValueError(f"--environment {path!r} must make an object with start(number), got {made!r}")
    return made
