"""Sampling from the fleet, which records what a trainer needs of each answer."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.client import completions
from app.client.calls import tokenize_chat
from app.client.completions import Answer, Completion
from app.client.connection import AsyncFleetClient, Call, FleetError
from deployments.protocol.rollouts import GROUP_HEADER, ID_HEADER, REQUEST_HEADER

ATTEMPTS = 3
VERSION_TIMEOUT_S = "120"
# Log-probabilities must be the policy's. Everything is explicit: vLLM takes defaults from the model's
# generation_config.json.
DISTRIBUTION = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class Unanswered(Exception):
    """The fleet does not answer this prompt; the text has the reason."""


class Moved(Exception):
    """The fleet no longer serves the requested version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model, sampled with `DISTRIBUTION`.

    Args:
        version: of completions; None: any.
        group: in the fleet's ledger; None: answers are not captured.
    """

    client: AsyncFleetClient
    model: str
    max_tokens: int
    stop: Sequence[str] = ()
    is_adapter: bool = False
    version: int | None = None
    group: str | None = None

    def attempt(self) -> str:
        return f"{self.group or 'evaluation'}.{uuid.uuid4().hex[:16]}"

    async def chat(self, messages: Sequence[Mapping[str, Any]], attempts: Sequence[str]) -> Sequence[Answer]:
        """One answer per attempt. Raises as `sample`; Unanswered also if it exceeds the model's context, or
        has an image that an engine cannot fetch or read."""
        body = self._sampling() | {"model": self.name, "messages": list(messages), "n": len(attempts)}
        try:
            answers = (await self.forward(completions.chat(body), "", ",".join(attempts))).answers
        except FleetError as error:
            has_bad_image = error.status in (400, 500) and image_urls(messages)
            if is_too_long(error) or has_bad_image:
                raise Unanswered(error.message) from error
            raise
        if len(answers) != len(attempts):
            raise FleetError(f"expected {len(attempts)} choices of the fleet's answer, got {len(answers)}")
        return answers

    async def complete(self, prompt_token_ids: Sequence[int], attempt: str) -> Answer:
        """Turns of an attempt go to one replica."""
        settings = self._sampling() | {"ignore_eos": False}
        call = completions.complete(self.name, prompt_token_ids, **settings)
        return (await self.forward(call, attempt, attempt)).answer

    async def forward(self, call: Call[Completion], session: str, attempt: str) -> Completion:
        """A request at the policy's version. `session` may be empty; `attempt`: several have commas between
        them. Raises as `sample`."""
        headers = self._headers(attempt) | ({"x-session-id": session} if session else {})
        call = replace(call, headers={**call.headers, **headers})
        return await sample(self.client, call, self.version)

    async def tokenize(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Raises ValueError for images, which token ids lack."""
        only_text(messages)
        return await self.client.send(tokenize_chat(self.name, messages))

    @property
    def name(self) -> str:
        """As in requests; an adapter's includes its version."""
        pinned = self.is_adapter and self.version is not None
        return f"{self.model}@{self.version}" if pinned else self.model

    def _sampling(self) -> dict[str, Any]:
        limits = {"max_tokens": self.max_tokens, "stop": list(self.stop)}
        return {**limits, **DISTRIBUTION, "return_token_ids": True}

    def _headers(self, attempt: str) -> dict[str, str]:
        """A repeated request has the same ones: its answer replaces the former."""
        headers = {}
        if self.group is not None:
            headers = {ID_HEADER: attempt, GROUP_HEADER: self.group, REQUEST_HEADER: uuid.uuid4().hex}
        if self.version is not None and not self.is_adapter:
            headers |= {"x-min-weight-version": str(self.version), "x-weight-timeout": VERSION_TIMEOUT_S}
        return headers


def image_urls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    parts = [part for each in messages if isinstance(each.get("content"), list) for part in each["content"]]
    urls = [part.get("image_url") for part in parts if isinstance(part, dict)]
    return [url for url in urls if isinstance(url, dict) and isinstance(url.get("url"), str)]


def only_text(messages: Sequence[Mapping[str, Any]]) -> None:
    if urls := image_urls(messages):
        raise ValueError(
            f"expected messages of text alone, from an environment of several turns, got {len(urls)} images"
        )


def is_too_long(error: FleetError) -> bool:
    """By vLLM's words: every wrong request is a 400."""
    words = ("maximum context length", "maximum model length", "max_tokens must be at least 1, got 0")
    return error.status == 400 and any(each in error.message for each in words)


async def sample(client: AsyncFleetClient, call: Call[Completion], version: int | None = None) -> Completion:
    """A completion without aborted answers, of this version (None: any). If one was aborted (`in_flight:
    abort`, a pause, `/abort_requests`), all are sampled again: finished ones are mostly short.

    Raises:
        Unanswered: the last attempt was aborted, or the fleet refuses this request for good.
        Moved: the last attempt was of another version.
        FleetError: the fleet refuses, or an answer is incomplete.
    """
    problem: Unanswered | Moved
    for _ in range(ATTEMPTS):
        try:
            completion = await client.send(call)
        except FleetError as error:
            if error.type == "deadly_request":
                raise Unanswered(error.message) from error
            raise
        if any(answer.aborted for answer in completion.answers):
            problem = Unanswered(f"the fleet aborted its answers {ATTEMPTS} times")
            continue
        require_complete(completion)
        seen = {v for each in completion.answers for v in (each.oldest_version, each.newest_version)}
        if version is None or seen == {version}:
            return completion
        problem = Moved(f"expected answers of version {version}, got {sorted(seen)}, {ATTEMPTS} times")
    raise problem


def require_complete(completion: Completion) -> None:
    if not completion.answers:
        raise FleetError("the fleet's answer has no choices")
    for answer in completion.answers:
        parts = {
            "token_ids": answer.token_ids,
            "weight_versions": answer.weight_versions,
            "finish_reason": answer.finish_reason,
        }
        if missing := [name for name, value in parts.items() if not value]:
            raise FleetError(f"a choice of the fleet's answer has no {', '.join(missing)}")
