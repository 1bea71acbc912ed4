"""A load of completion requests, and what its clients measure.

A client in Python handles about ten thousand streamed tokens a second. A load for a GPU comes from several
processes, so that the server is the bottleneck and not the client.
"""

import asyncio
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import aiohttp

from benchmarks.servers import MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many requests, how many at a time, and of what kind."""

    requests: int
    concurrency: int
    max_tokens: int = 48
    stream: bool = True
    processes: int = 1  # client processes that share requests and concurrency


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the clients of one load measured."""

    requests_per_s: float
    tokens_per_s: float
    first_token_ms: float  # median; of a plain answer, all of it
    longest_gap_ms: float  # between two pieces of one stream


@dataclass(slots=True)
class _Request:
    """One request, and when the pieces of its answer arrived (seconds)."""

    started: float
    pieces: list[float]

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


def run(url: str, load: Load) -> Measured:
    """Send the load to a server.

    Raises:
        RuntimeError: a request was not answered.
    """
    share = replace(
        load, requests=load.requests // load.processes, concurrency=load.concurrency // load.processes
    )
    if load.processes == 1:
        results = [_share(url, share)]
    else:
        with ProcessPoolExecutor(load.processes, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_wait, range(load.processes)))  # imports are not part of the load
            results = list(pool.map(_share, [url] * load.processes, [share] * load.processes))
    begin = min(begin for begin, _, _ in results)
    took = max(end for _, end, _ in results) - begin
    requests = [request for _, _, part in results for request in part]
    return Measured(
        requests_per_s=len(requests) / took,
        tokens_per_s=len(requests) * load.max_tokens / took,
        first_token_ms=1000 * statistics.median(r.pieces[0] - r.started for r in requests),
        longest_gap_ms=1000 * max((gap for r in requests for gap in r.gaps), default=0.0),
    )


def _wait(_: int) -> None:
    time.sleep(0.05)  # long enough that each process of the pool gets one call


def _share(url: str, load: Load) -> tuple[float, float, list[_Request]]:
    return asyncio.run(_clients(url, load))


async def _clients(url: str, load: Load) -> tuple[float, float, list[_Request]]:
    limit = asyncio.Semaphore(load.concurrency)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
        begin = time.time()  # comparable between processes
        requests = await asyncio.gather(*[_one(client, load, limit, index) for index in range(load.requests)])
        return begin, time.time(), requests


async def _one(client: aiohttp.ClientSession, load: Load, limit: asyncio.Semaphore, index: int) -> _Request:
    body = {
        "model": MODEL,
        "prompt": f"Write number {index} as a word, then tell a story.",
        "max_tokens": load.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": load.stream,
    }
    async with limit:
        request = _Request(time.perf_counter(), [])
        async with client.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            async for piece in answer.content.iter_any():
                request.pieces.append(time.perf_counter())
                last = piece
        if load.stream and not last.rstrip().endswith(b"[DONE]"):
            raise RuntimeError(f"a stream ended early: {last[-200:]!r}")
        return request
