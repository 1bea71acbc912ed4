"""Completions, with the weight version behind every token."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.client.connection import Call, FleetError
from trainers.trajectory import Trajectory, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sampled completion, or one piece of a stream."""

    text: str
    token_ids: list[int]
    logprobs: list[float]  # empty unless requested
    weight_versions: list[VersionSpan]  # over `token_ids`; in a stream only the last piece has them
    version: int | None = None  # newest weights of the completion
    adapter: str | None = None  # NAME@VERSION; None: the base model
    replica: str = ""
    finish_reason: str | None = None  # vLLM's; "abort": cut off; None before a stream's last piece

    @property
    def oldest_version(self) -> int:
        """Version of the adapter, else the oldest weights behind any token."""
        return min(span.version for span in self.trained_versions)

    @property
    def newest_version(self) -> int:
        return max(span.version for span in self.trained_versions)

    @property
    def aborted(self) -> bool:
        """By an update, a pause or `/abort_requests`."""
        return self.finish_reason == "abort"

    def trajectory(self, prompt_token_ids: Sequence[int], advantage: float | tuple[float, ...]) -> Trajectory:
        return Trajectory(
            prompt_token_ids=tuple(prompt_token_ids),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            advantage=advantage,
            weight_versions=tuple(self.trained_versions),
        )

    @property
    def trained_versions(self) -> Sequence[VersionSpan]:
        """An adapter has one version."""
        if self.adapter is None:
            return self.weight_versions
        version = int(self.adapter.rpartition("@")[2])
        return [VersionSpan(version=version, start=0, end=len(self.token_ids))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The sampled completions of one prompt."""

    answers: Sequence[Answer]
    prompt_token_ids: Sequence[int] = ()  # empty if not requested

    @property
    def answer(self) -> Answer:
        """The only answer. Raises ValueError."""
        (answer,) = self.answers
        return answer


def complete(
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> Call[Completion]:
    """A greedy completion of exactly `max_tokens` tokens, unless `options` (vLLM's) differ."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }
    sent = {} if headers is None else headers
    return Call(method="POST", path="/v1/completions", body=body, headers=sent, read=read_completion)


def chat(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Call[Completion]:
    """`body` is vLLM's."""
    sent = {} if headers is None else headers
    return Call(method="POST", path="/v1/chat/completions", body=body, headers=sent, read=read_completion)


def join(pieces: Iterable[Completion]) -> Answer:
    """The pieces of a stream. Raises ValueError if there are none."""
    answers = [answer for piece in pieces for answer in piece.answers]
    if not answers:
        raise ValueError("expected at least one piece of an answer, got none")
    return Answer(
        text="".join(answer.text for answer in answers),
        token_ids=[token for answer in answers for token in answer.token_ids],
        logprobs=[logprob for answer in answers for logprob in answer.logprobs],
        weight_versions=answers[-1].weight_versions,
        version=answers[-1].version,
        adapter=answers[-1].adapter,
        replica=answers[-1].replica,
        finish_reason=answers[-1].finish_reason,
    )


def read_completion(content: bytes, headers: Mapping[str, str]) -> Completion:
    """A completion, or one event of its stream. Raises ValueError, KeyError or TypeError (not a completion)
    or FleetError (the event reports a failure)."""
    data: dict[str, Any] = json.loads(content)
    if "error" in data:
        raise FleetError(f"the request failed in the middle of its answer: {data['error']}")
    replica = headers.get("x-slipstream-replica", "")
    return Completion(
        answers=[_answer(choice, data.get("weight_version"), replica) for choice in data["choices"]],
        prompt_token_ids=data.get("prompt_token_ids") or (),
    )


def _answer(choice: Mapping[str, Any], version: int | None, replica: str) -> Answer:
    message = choice.get("message") or choice.get("delta") or {}
    text = choice.get("text") if "text" in choice else message.get("content")
    return Answer(
        text=text or "",
        token_ids=choice.get("token_ids") or [],
        logprobs=_logprobs(choice.get("logprobs") or {}),
        weight_versions=[  # `/inference/v1/generate` has the version as text
            VersionSpan(version=int(span["version"]), start=span["start"], end=span["end"])
            for span in choice.get("weight_versions") or ()
        ],
        version=version,
        adapter=choice.get("adapter"),
        replica=replica,
        finish_reason=choice.get("finish_reason"),
    )


def _logprobs(logprobs: Mapping[str, Any]) -> list[float]:
    """`/v1/completions` has a list, `/v1/chat/completions` an object per token."""
    values = logprobs.get("token_logprobs")
    if values is None:
        values = [entry["logprob"] for entry in logprobs.get("content") or ()]
    return [float(value) for value in values]
