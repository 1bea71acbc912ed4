"""A load of streaming chat requests, and what its clients feel."""

import asyncio
import re
import statistics
import time
from dataclasses import dataclass

import httpx

from benchmarks.servers import MODEL

CONTENT = re.compile(rb'"content":"[^"]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    requests: int
    concurrency: int
    max_tokens: int = 48
    stream: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Felt:
    requests_per_s: float
    tokens_per_s: float
    first_token_ms: float  # median
    longest_gap_ms: float  # between two pieces of one stream


@dataclass(slots=True)
class _Request:
    started: float
    pieces: list[float]

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


async def run(url: str, load: Load) -> Felt:
    limits = httpx.Limits(max_connections=load.concurrency)
    turn = asyncio.Semaphore(load.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        begin = time.perf_counter()
        requests = await asyncio.gather(*[_one(client, load, turn, index) for index in range(load.requests)])
        took = time.perf_counter() - begin
    return Felt(
        requests_per_s=load.requests / took,
        tokens_per_s=load.requests * load.max_tokens / took,
        first_token_ms=1000 * statistics.median(r.pieces[0] - r.started for r in requests),
        longest_gap_ms=1000 * max((gap for r in requests for gap in r.gaps), default=0.0),
    )


async def _one(client: httpx.AsyncClient, load: Load, turn: asyncio.Semaphore, index: int) -> _Request:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Write number {index} as a word, then tell a story."}],
        "max_tokens": load.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": load.stream,
    }
    async with turn:
        request = _Request(time.perf_counter(), [])
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for piece in answer.aiter_bytes():
                # The first event of a chat stream is the role, sent before any token; events may
                # travel together.
                if CONTENT.search(piece):
                    request.pieces.append(time.perf_counter())
        return request
