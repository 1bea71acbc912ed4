"""Answers from the fleet, over the OpenAI API, with what a trainer needs of them."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from app.jobs.groups import Answer
from trainers.trajectory import VersionSpan

RETRY_PAUSE_S = 1.0
RETRY_FOR_S = 300.0  # the fleet may be replacing a replica


class FleetError(RuntimeError):
    """The fleet refused, or cannot be reached; the text says what a person can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are sampled: from the model's own distribution, so that log-probabilities are the policy's.

    Every setting that changes the distribution is given: vLLM fills what is left out from the
    model's generation_config.json.
    """

    answers: int
    max_tokens: int
    stop: Sequence[str] = ()

    def request(self, model: str, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        return {
            "model": model,
            "messages": list(messages),
            "n": self.answers,
            "max_tokens": self.max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(self.stop),
            "logprobs": True,
            "return_token_ids": True,
        }


async def call(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """A JSON answer; waits and tries again while the fleet is short of replicas or trainer (503).

    Raises:
        FleetError: any other refusal, or nothing better within `RETRY_FOR_S`.
    """
    deadline = time.monotonic() + RETRY_FOR_S
    while True:
        pause = RETRY_PAUSE_S
        try:
            answer = await client.request(method, path, json=body)
            if answer.status_code < 400:
                parsed: dict[str, Any] = answer.json()
                return parsed
            problem = f"{method} {path}: {answer.status_code} {answer.text[:1000]}"
            if answer.status_code != 503:
                raise FleetError(problem)
            pause = float(answer.headers.get("retry-after", RETRY_PAUSE_S))
        except httpx.TransportError as error:
            problem = f"{method} {path}: {type(error).__name__}: {error}"
            # What was sent may have been done: a step must not be done twice.
            if method == "POST" and path.startswith("/train/") and not isinstance(error, httpx.ConnectError):
                raise FleetError(problem) from error
        if time.monotonic() > deadline:
            raise FleetError(problem)
        await asyncio.sleep(pause)


def parse_answers(body: Mapping[str, Any]) -> tuple[tuple[int, ...], list[Answer]]:
    """Prompt tokens and answers of a chat completion.

    Raises:
        FleetError: something that a trainer needs is missing; the message names it.
    """
    prompt = body.get("prompt_token_ids")
    if not prompt:
        raise FleetError(f"the fleet's answer has no prompt_token_ids, got {sorted(body)}")
    return tuple(prompt), [_answer(choice) for choice in body["choices"]]


def _answer(choice: Mapping[str, Any]) -> Answer:
    token_ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("content")
    spans = choice.get("weight_versions")
    missing = [
        name
        for name, value in (("token_ids", token_ids), ("logprobs", logprobs), ("weight_versions", spans))
        if not value
    ]
    if missing or token_ids is None or logprobs is None or spans is None:
        raise FleetError(f"a choice of the fleet's answer has no {', '.join(missing)}")
    if len(token_ids) != len(logprobs):
        raise FleetError(f"a choice has {len(token_ids)} token ids but {len(logprobs)} log-probabilities")
    return Answer(
        token_ids=tuple(token_ids),
        logprobs=tuple(float(entry["logprob"]) for entry in logprobs),
        text=choice["message"]["content"] or "",
        weight_versions=tuple(VersionSpan(**span) for span in spans),
    )
