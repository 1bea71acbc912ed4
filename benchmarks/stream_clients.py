"""Clients that stream: each sends a request, counts the events of its answer, and begins again.

    python -m benchmarks.stream_clients PORT --streams 64 --tokens 200 --seconds 10

Prints one line of JSON: events, seconds, the first-token times and the longest pause between two reads of a
stream. `--prompt-bytes`: of each body. Counting looks for one word in what arrives, without parsing it.
"""

import argparse
import asyncio
import json
import time
import uuid
from typing import cast

import uvloop

ROLLOUT = b"0" * 32  # another id in each captured request
WORD, LAST = b"finish_reason", b"0\r\n\r\n"


class Stream(asyncio.Protocol):
    """One connection, with one request after another."""

    def __init__(self, request: bytes, counts: "Counts") -> None:
        self._request = request
        self._counts = counts
        self._sent = self._read = 0.0
        self._begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._ask()

    def _ask(self) -> None:
        self._sent, self._begun = time.perf_counter(), False
        self.transport.write(self._request.replace(ROLLOUT, uuid.uuid4().hex.encode(), 1))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        events = data.count(WORD)
        if events:
            if self._begun:
                self._counts.pause_s = max(self._counts.pause_s, now - self._read)
            else:
                self._begun = True
                self._counts.first_s.append(now - self._sent)
            self._read = now
            self._counts.events += events
        if data.endswith(LAST):
            if not self._begun:
                raise RuntimeError(f"expected a stream, got {data[:300]!r}")
            self._counts.answers += 1
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        self._counts.lost += 1


class Counts:
    def __init__(self) -> None:
        self.reset()
        self.lost = 0

    def reset(self) -> None:
        self.events = self.answers = 0
        self.pause_s = 0.0
        self.first_s: list[float] = []


def request(port: int, tokens: int, prompt_bytes: int, *, captured: bool) -> bytes:
    body = json.dumps(
        {"model": "model", "prompt": "a " * (prompt_bytes // 2), "max_tokens": tokens, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    if captured:
        head += f"x-rollout-id: {ROLLOUT.decode()}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warm-s", type=float, default=2.0)
    parser.add_argument("--prompt-bytes", type=int, default=1000)
    parser.add_argument("--captured", action="store_true")
    options = parser.parse_args()
    content = request(options.port, options.tokens, options.prompt_bytes, captured=options.captured)
    counts = Counts()
    loop = asyncio.get_running_loop()
    for _ in range(options.streams):
        await loop.create_connection(lambda: Stream(content, counts), "127.0.0.1", options.port)
    await asyncio.sleep(options.warm_s)
    print("warm", flush=True)
    counts.reset()
    began = time.perf_counter()
    await asyncio.sleep(options.seconds)
    result = {
        "events": counts.events,
        "answers": counts.answers,
        "lost": counts.lost,
        "seconds": time.perf_counter() - began,
        "first_s": sorted(counts.first_s),
        "pause_s": counts.pause_s,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
