"""A client of a fleet that is a function, and what a fleet answers."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from app.client.connection import AsyncFleetClient


def client_of(
    answer: Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]], **options: Any
) -> AsyncFleetClient:
    """`options` are those of `AsyncFleetClient`."""
    http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://fleet")  # type: ignore[arg-type]
    return AsyncFleetClient(http, **options)


def refusal(status: int, kind: str, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"type": kind, "message": message, "detail": {}}})


def chat_choice(
    token_ids: Sequence[int],
    *,
    text: str = "said",
    logprob: float = -0.5,
    version: int = 3,
    finish_reason: str = "stop",
) -> dict[str, Any]:
    """One of the choices of a chat completion; all tokens have the same version and log-probability."""
    return {
        "message": {"content": text},
        "token_ids": list(token_ids),
        "logprobs": {"content": [{"logprob": logprob}] * len(token_ids)},
        "weight_versions": [{"version": version, "start": 0, "end": len(token_ids)}],
        "finish_reason": finish_reason,
    }
