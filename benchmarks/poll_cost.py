"""What polls cost the controller's process, without Serve around it.

    python -m benchmarks.poll_cost 256 1024

The controller with its journal on disk, in an event loop of uvloop's. Replicas without engines follow it over
their connections, from two processes. Prints CPU times of the controller's process, and how late its loop is.
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import uvloop

from benchmarks.fleet_size import PAYLOADS, ROUNDS
from benchmarks.followers import InstantMember
from deployments.calls.rpc import CallAddress, CallHandle, CallServer
from deployments.controller.controller import Controller
from deployments.ledger.ledger_config import LedgerConfig
from deployments.protocol.publishing import RoundOptions
from deployments.replica.follower import Follower

TICK_S = 0.01


async def follow(first: int, count: int, address: CallAddress) -> None:
    """Some of the replicas, in this process."""

    names = [f"replica-{number}" for number in range(first, first + count)]
    followers = [
        Follower(
            replica_id=name, incarnation=name, member=InstantMember(), poll=CallHandle(address).poll.remote
        )
        for name in names
    ]
    await asyncio.gather(*[each.run() for each in followers])


async def watch_loop(late_s: list[float]) -> None:
    """How late this event loop comes back."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK_S)
        late_s.append(time.perf_counter() - began - TICK_S)


def started(count: int, address: CallAddress) -> list[subprocess.Popen[bytes]]:
    where = f"{address.url} {address.key}"
    command = (sys.executable, "-m", "benchmarks.poll_cost", "--follow", where)
    half = count // 2
    return [subprocess.Popen((*command, str(first), str(half))) for first in (0, half)]


async def measure(count: int, directory: str) -> str:
    controller = Controller(
        config=LedgerConfig(min_replicas=1),
        state_dir=f"{directory}/state",
        store_dir=f"{directory}/store",
        is_alive=lambda replica_id: True,
        kill=lambda replica_id: None,
    )
    server = CallServer(controller, lambda: "127.0.0.1")
    began = time.process_time()
    processes = started(count, await server.address())
    try:
        while (await controller.health()).serving < count:
            await asyncio.sleep(0.1)
        joined_cpu_s = time.process_time() - began
        lease = await controller.acquire("benchmark")
        await controller.connect(lease.token, {})
        await asyncio.sleep(2.0)
        began = time.process_time()
        await asyncio.sleep(5.0)
        idle = (time.process_time() - began) / 5.0
        late_s: list[float] = []
        watching = asyncio.create_task(watch_loop(late_s))
        cpu_s, took_s = await rounds(controller, lease.token)
        watching.cancel()
    finally:
        await server.aclose()
        for each in processes:
            each.send_signal(signal.SIGKILL)
            each.wait()
    late_s.sort()
    return (
        f"| {count} | {joined_cpu_s:.2f} | {cpu_s:.2f} | {took_s:.2f} | {idle:.2f} "
        f"| {1000 * statistics.median(late_s):.0f}, {1000 * late_s[int(0.99 * (len(late_s) - 1))]:.0f} |"
    )


async def rounds(controller: Controller, token: int) -> tuple[float, float]:
    """CPU time and time of one round, medians."""
    cpu_s, took_s = [], []
    for _ in range(ROUNDS):
        cpu_began, began = time.process_time(), time.perf_counter()
        round_id = await controller.open_round(token, RoundOptions(persist=False))
        for _ in range(PAYLOADS):
            await controller.send(token, round_id, {})
        await controller.close_round(token, round_id, None)
        cpu_s.append(time.process_time() - cpu_began)
        took_s.append(time.perf_counter() - began)
    return statistics.median(cpu_s), statistics.median(took_s)


def followed(where: str, numbers: Sequence[int]) -> None:
    url, key = where.split(" ", 1)
    uvloop.run(follow(*numbers, CallAddress(url=url, key=key)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("numbers", type=int, nargs="+", metavar="replicas")
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follow:
        return followed(options.follow, options.numbers)
    print(
        "| replicas | all join: CPU (s) | a round: CPU (s) | and time (s) | a core's share when idle "
        "| the loop is late by: median, 99 % (ms) |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for count in options.numbers:
        with tempfile.TemporaryDirectory() as directory:
            print(uvloop.run(measure(count, directory)), flush=True)
    os._exit(0)  # the controller's threads


if __name__ == "__main__":
    main()
