"""How answers are sampled from the fleet, and what a trainer needs of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.client.calls import tokenize_chat
from app.client.completions import Answer, Completion, chat, complete
from app.client.connection import AsyncFleetClient, Call, FleetError

ATTEMPTS = 3  # for one prompt
VERSION_TIMEOUT_S = "120"  # that a replica may take to have a version
# Samples from the model's own distribution, so that log-probabilities are those of the policy. Every setting
# that changes it is given: vLLM fills in the others from the model's generation_config.json.
DISTRIBUTION = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How many answers, and how long; all are from `DISTRIBUTION`."""

    answers: int
    max_tokens: int
    stop: Sequence[str] = ()

    def call(
        self,
        model: str,
        messages: Sequence[Mapping[str, str]],
        headers: Mapping[str, str] | None = None,
    ) -> Call[Completion]:
        """The chat completion of one prompt."""
        body = self._options() | {"model": model, "messages": list(messages), "logprobs": True}
        return chat(body, headers)

    def turn(self, model: str, prompt: Sequence[int], headers: Mapping[str, str]) -> Call[Completion]:
        """What follows these tokens."""
        return complete(model, prompt, **self._options(), headers=headers, logprobs=0, ignore_eos=False)

    def _options(self) -> dict[str, Any]:
        return {
            "n": self.answers,
            "max_tokens": self.max_tokens,
            **DISTRIBUTION,
            "stop": list(self.stop),
            "return_token_ids": True,
        }


class Moved(Exception):
    """The fleet serves another version than the wanted one, and goes on doing so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model behind the fleet's address, as an environment sees it.

    Args:
        version: answers are of exactly this version; None: of any.
        is_adapter: whether `model` is an adapter's name.
    """

    client: AsyncFleetClient
    model: str
    sampling: Sampling
    is_adapter: bool = False
    version: int | None = None

    async def answers(self, messages: Sequence[Mapping[str, str]], count: int) -> Completion:
        """So many answers to one conversation.

        Raises:
            Unanswered, FleetError: as `sample`.
            Moved: the wanted version is not served any more.
        """
        sampling = replace(self.sampling, answers=count)
        return await self._sample(sampling.call(self.name, messages, self._headers(None)))

    async def turn(self, prompt_token_ids: Sequence[int], session: str) -> Answer:
        """What the model says after these tokens; a session's turns are answered by one replica.

        Raises:
            Unanswered, FleetError, Moved: as `answers`.
        """
        sampling = replace(self.sampling, answers=1)
        call = sampling.turn(self.name, prompt_token_ids, self._headers(session))
        return (await self._sample(call, with_prompt=False)).answer

    async def exchange(self, call: Call[Completion], session: str, *, with_prompt: bool) -> Completion:
        """The answer to a request of an agent's own, of the wanted version.

        Args:
            with_prompt: the answer has the prompt's tokens.

        Raises:
            Unanswered, FleetError, Moved: as `answers`.
        """
        sent = replace(call, headers={**call.headers, **self._headers(session or None)})
        return await self._sample(sent, with_prompt=with_prompt)

    async def tokenize(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the model answers.

        Raises:
            FleetError: the fleet refuses it.
        """
        return await self.client.send(tokenize_chat(self.name, messages))

    @property
    def name(self) -> str:
        """The model's, in requests; an adapter's with the wanted version."""
        pinned = self.is_adapter and self.version is not None
        return f"{self.model}@{self.version}" if pinned else self.model

    def _headers(self, session: str | None) -> dict[str, str]:
        headers = {} if session is None else {"x-session-id": session}
        if self.version is not None and not self.is_adapter:
            headers |= {"x-min-weight-version": str(self.version), "x-weight-timeout": VERSION_TIMEOUT_S}
        return headers

    async def _sample(self, call: Call[Completion], *, with_prompt: bool = True) -> Completion:
        for _ in range(ATTEMPTS):
            completion = await sample(self.client, call, with_prompt=with_prompt)
            seen = {v for each in completion.answers for v in (each.oldest_version, each.newest_version)}
            if self.version is None or seen == {self.version}:
                return completion
        raise Moved(f"expected answers of version {self.version}, got {sorted(seen)}, {ATTEMPTS} times")


class Unanswered(Exception):
    """The fleet does not answer this prompt; the text says why. Others may be answered."""


async def sample(client: AsyncFleetClient, call: Call[Completion], *, with_prompt: bool = True) -> Completion:
    """A completion whose answers all ended by themselves.

    The fleet may cut answers off: at an update with `in_flight: abort`, at a pause, at `/abort_requests`. A
    part of an answer has no reward. All answers to the prompt are then sampled again, also those that had
    ended: they would be short ones more often than not.

    Raises:
        Unanswered: each attempt was cut off, or the fleet refuses this request for good.
        FleetError: the fleet refuses, or an answer lacks something that a trainer needs.
    """
    for _ in range(ATTEMPTS):
        try:
            completion = await client.send(call)
        except FleetError as error:
            if error.type == "deadly_request":
                raise Unanswered(error.message) from error
            raise
        if not any(answer.aborted for answer in completion.answers):
            require_complete(completion, with_prompt=with_prompt)
            return completion
    raise Unanswered(f"the fleet aborted its answers {ATTEMPTS} times")


def require_complete(completion: Completion, *, with_prompt: bool = True) -> None:
    """Check that each answer has everything that a trainer needs.

    Raises:
        FleetError: something is missing; the message names it.
    """
    if with_prompt and not completion.prompt_token_ids:
        raise FleetError("the fleet's answer has no prompt_token_ids")
    for answer in completion.answers:
        parts = {
            "token_ids": answer.token_ids,
            "logprobs": answer.logprobs,
            "weight_versions": answer.weight_versions,
            "finish_reason": answer.finish_reason,
        }
        if missing := [name for name, value in parts.items() if not value]:
            raise FleetError(f"a choice of the fleet's answer has no {', '.join(missing)}")
        if len(answer.token_ids) != len(answer.logprobs):
            raise FleetError(
                f"a choice has {len(answer.token_ids)} token ids but {len(answer.logprobs)} log-probabilities"
            )
