"""A running fleet, as an outside program sees it: over HTTP."""

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

Span = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    tokens: list[int]
    version: int
    spans: list[Span]  # {"version", "start", "end"} over the tokens


class Service:
    """Args:
    url: of the fleet, without a path.
    token: the fleet's bearer token; None where it needs none.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._client = httpx.Client(base_url=self.url, timeout=timeout_s, headers=self.headers)
        self._timeout_s = timeout_s
        self.model = str(self.get("/v1/models")["data"][0]["id"])

    def get(self, path: str) -> Any:
        return _json(self._client.get(path))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return _json(self._client.post(path, json={} if body is None else body))

    def version(self) -> int:
        return int(self.get("/fleet")["committed_version"])

    def tokenize(self, prompt: str) -> list[int]:
        body = {"model": self.model, "prompt": prompt, "add_special_tokens": False}
        return [int(token) for token in self.post("/tokenize", body)["tokens"]]

    def complete(self, prompt: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
        """vLLM's own answer to a greedy completion (unless `options` say otherwise)."""
        answer: dict[str, Any] = self.post("/v1/completions", self.completion(prompt, max_tokens, **options))
        return answer

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        data = self.complete(prompt, max_tokens)
        choice = data["choices"][0]
        return Answer(
            text=choice["text"],
            tokens=choice["token_ids"],
            version=data["weight_version"],
            spans=choice["weight_versions"],
        )

    def completion(self, prompt: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **options,
        }

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed greedy completion."""
        body = self.completion(prompt, max_tokens, stream=True)
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=self._timeout_s, headers=self.headers) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            if response.status_code != 200:
                raise RuntimeError(f"/v1/completions: {response.status_code}: {(await response.aread())!r}")
            rest = b""
            async for piece in response.aiter_bytes():
                # Not by lines: they would also end at U+0085 and its like, which JSON may hold.
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: {"):
                        yield json.loads(event[6:])


def token_from(environment: dict[str, str] | None = None) -> str | None:
    """The fleet's token, from where the fleet itself takes it."""
    return (os.environ if environment is None else environment).get("SLIPSTREAM_TOKEN") or None


def _json(answer: httpx.Response) -> Any:
    """Raises RuntimeError with what the fleet says went wrong."""
    if answer.is_success:
        return answer.json() if answer.content else None
    try:
        reason = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = answer.text[:500]
    raise RuntimeError(f"{answer.request.method} {answer.request.url.path}: {answer.status_code}: {reason}")
