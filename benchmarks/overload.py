"""Ten times more clients than places: what is refused, how fast control routes answer, and what stays.

    python -m benchmarks.overload
    python -m benchmarks.overload --places 256 --processes 8 --device cuda --model Qwen/Qwen3-1.7B

One fleet and the same measure several times: as many clients as places, ten times as many, half of them
beside slow readers and clients that go away in mid-stream, and as many again. Control routes are called
meanwhile by a process of its own, since a busy client would measure itself. Prints one table; exits with 1
if anything but 200 and 503 with Retry-After was answered.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import httpx

from benchmarks.process_samples import MARK, Sampler
from benchmarks.servers import CPU, MODEL, Setup, fleet, gpu

CONTROL = (("GET", "/health"), ("GET", "/fleet"), ("GET", "/fleet/rounds"), ("GET", "/is_paused"))
PAUSE = (("POST", "/pause?mode=keep"), ("POST", "/resume"))
MAX_TOKENS = 48
CONTROL_PAUSE_S = 0.1
SLOW_READER_BYTES = 64


@dataclass(slots=True)
class Seen:
    """What the clients of one measure saw."""

    took_s: float = 0.0
    tokens: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    control_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)

    def add(self, other: "Seen") -> None:
        """What another process saw at the same time."""
        self.took_s = max(self.took_s, other.took_s)
        self.tokens += other.tokens
        self.answers += other.answers
        self.refused_s += other.refused_s
        self.control_s += other.control_s
        self.pause_s += other.pause_s


class Clients:
    """The clients of one measure in one process.

    Args:
        end: of the measure, by `time.monotonic`, which is the same in all processes of a host.
    """

    def __init__(self, session: aiohttp.ClientSession, end: float) -> None:
        self._session = session
        self._end = end
        self.seen = Seen()

    async def run(self, *clients: Callable[[], Awaitable[None]]) -> Seen:
        began = time.perf_counter()
        await asyncio.gather(*[self._repeat(client) for client in clients])
        self.seen.took_s = time.perf_counter() - began  # the last answers end after the measure
        return self.seen

    async def _repeat(self, client: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < self._end:
            await client()

    async def whole(self) -> None:
        """Reads a stream to its end; waits as long as a refusal says."""
        began = time.perf_counter()
        async with self._session.post("/v1/completions", json=body()) as answer:
            if answer.status == 200:
                content = await answer.read()
                whole = content.rstrip().endswith(b"[DONE]")
                self.seen.tokens += MAX_TOKENS if whole else 0
                self.seen.answers["200" if whole else "cut off"] += 1
                return
            await answer.read()
            wait = answer.headers.get("retry-after")
            self.seen.answers[f"{answer.status}" + ("" if wait else " without Retry-After")] += 1
            self.seen.refused_s.append(time.perf_counter() - began)
        await asyncio.sleep(float(wait or 1))

    async def leaves(self) -> None:
        """Goes away after the first bytes."""
        async with self._session.post("/v1/completions", json=body(1000)) as answer:
            if answer.status == 200:
                await answer.content.read(SLOW_READER_BYTES)
                answer.close()
        await asyncio.sleep(0.5)

    async def reads_slowly(self) -> None:
        """Takes a few bytes a second, until the measure ends."""
        async with self._session.post("/v1/completions", json=body(1000), read_bufsize=64) as answer:
            while time.monotonic() < self._end and await answer.content.read(SLOW_READER_BYTES):
                await asyncio.sleep(0.5)
            answer.close()

    async def control(self) -> None:
        """Calls each control route once."""
        for method, path in CONTROL:
            self.seen.control_s.append(await self._call(method, path))
            await asyncio.sleep(CONTROL_PAUSE_S)

    async def pauses(self) -> None:
        """Pauses and resumes the fleet, every few seconds."""
        for method, path in PAUSE:
            self.seen.pause_s.append(await self._call(method, path))
        await asyncio.sleep(5.0)

    async def _call(self, method: str, path: str) -> float:
        began = time.perf_counter()
        async with self._session.request(method, path) as answer:
            await answer.read()
            if answer.status != 200:
                self.seen.answers[f"{path}: {answer.status}"] += 1
        return time.perf_counter() - began


def body(max_tokens: int = MAX_TOKENS) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": "Tell a story.",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


def share(url: str, end: float, counts: Mapping[str, int]) -> Seen:
    """Run so many clients of each kind, a method of `Clients`, in this process."""
    return asyncio.run(_share(url, end, counts))


async def _share(url: str, end: float, counts: Mapping[str, int]) -> Seen:
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        clients = Clients(session, end)
        return await clients.run(*[getattr(clients, kind) for kind, n in counts.items() for _ in range(n)])


def measure(url: str, options: argparse.Namespace, sampler: Sampler) -> dict[str, Seen]:
    """All measures, by name."""
    places, processes = options.places, options.processes
    measured: dict[str, Seen] = {}
    with ProcessPoolExecutor(processes + 1, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(time.sleep, [1.0] * (processes + 1)))  # all have started
        for number, (name, count, awkward) in enumerate(
            [
                ("as many as places", places, 0),
                ("ten times as many", 10 * places, 0),
                ("half, beside others", places // 2, places // 4),
                ("half", places // 2, 0),
                ("as many again", places, 0),
            ]
        ):
            counts = {"whole": count, "leaves": awkward, "reads_slowly": awkward}
            shares = [
                {kind: len(range(p, n, processes)) for kind, n in counts.items()} for p in range(processes)
            ]
            end = time.monotonic() + options.seconds
            running = [pool.submit(share, url, end, each) for each in [*shares, {"control": 1, "pauses": 1}]]
            seen = measured[name] = Seen()
            for each in running:
                seen.add(each.result())
            time.sleep(2.0)
            answer = httpx.post(f"{url}/abort_requests", json={}, timeout=60, trust_env=False)
            if left := answer.raise_for_status().json()["aborted"]:
                seen.answers["left in the engines"] += left
            sampler.sample(number)
            print(f"{name}: {dict(seen.answers)}", file=sys.stderr, flush=True)
    return measured


def show(measured: dict[str, Seen]) -> None:
    print(
        "| clients | tokens/s | answers | 503 (ms) | control, median (ms) | 99 % (ms) | pause, resume (ms) |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, seen in measured.items():
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(seen.answers.items()))
        refused = f"{1000 * statistics.median(seen.refused_s):.0f}" if seen.refused_s else ""
        ordered = sorted(seen.control_s)
        print(
            f"| {name} | {seen.tokens / seen.took_s:.0f} | {answers} | {refused} "
            f"| {1000 * statistics.median(ordered):.0f} "
            f"| {1000 * ordered[int(0.99 * (len(ordered) - 1))]:.0f} "
            f"| {1000 * statistics.median(seen.pause_s):.0f} |"
        )


def grown(sampler: Sampler) -> None:
    """Memory, files and threads of the fleet's processes after the first measure and after the last."""
    first, last = sampler.samples[0].rounds, sampler.samples[-1].rounds
    before = {each.pid: each.figures for each in sampler.samples if each.rounds == first and each.pid}
    print("\n| process | PSS (MiB) | open files | threads |\n|---|---|---|---|")
    for each in sampler.samples:
        if each.rounds == last and each.pid in before and "Serve" in each.title.title():
            pairs = [(before[each.pid][name], each.figures[name]) for name in ("pss_mib", "files", "threads")]
            print(f"| {each.title} | " + " | ".join(f"{a:.0f} to {b:.0f}" for a, b in pairs) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measure")
    parser.add_argument(
        "--processes", type=int, default=1, help="of the clients, beside that of control routes"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", type=Path, help="a directory; on a GPU")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--port", type=int, default=9730)
    options = parser.parse_args()
    setup: Setup = CPU if options.device == "cpu" else gpu(options.model)
    os.environ[MARK] = mark = uuid.uuid4().hex
    sampler = Sampler(mark)
    router = {"max_ongoing_requests": options.places}
    with fleet(options.port, setup=setup, replicas=options.replicas, router=router) as url:
        measured = measure(url, options, sampler)
        show(measured)
        grown(sampler)
    wrong = {status for seen in measured.values() for status in seen.answers} - {"200", "503"}
    sys.exit(f"also answered: {sorted(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
