"""What one round costs the control plane of a large fleet.

    python -m benchmarks.fleet_size --ledger 8 64 256 1024
    python -m benchmarks.fleet_size --serve 8 256 1024

`--ledger`: CPU time of the state machine alone, every poll of every replica included. `--serve`: the
controller as Serve runs it, its journal on disk; replicas without engines follow it with the follower of real
ones, found over Serve's handles, from a few processes of this host. Meanwhile a process of its own asks for
what `/fleet`, `/fleet/events` and `/fleet/rounds` answer, every 50 ms. Prints one table each.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from pydantic import TypeAdapter
from ray import serve

from benchmarks.followers import InstantMember, LedgerFollower
from deployments.calls.rpc import CallHandle
from deployments.controller.controller import Controller
from deployments.ledger.ledger import Ledger
from deployments.ledger.state import PendingCall
from deployments.protocol.ledger_config import LedgerConfig
from deployments.protocol.publishing import RoundOptions
from deployments.replica.follower import Follower

PAYLOADS = 4  # of one round
ROUNDS = 5
ASK_S = 0.05
START_S = 300.0
APP = "fleet-size"


class Timed:
    """A ledger with its replicas, and the CPU time that it takes."""

    def __init__(self, count: int) -> None:
        self.ledger = Ledger(LedgerConfig(min_replicas=1))
        self.followers = [LedgerFollower(number) for number in range(count)]
        self.now, self.cpu_s, self.polls = 0.0, 0.0, 0

    def poll_all(self) -> None:
        self.now += 0.001
        for follower in self.followers:
            report = follower.report()
            began = time.process_time()
            directive = self.ledger.poll(report, self.now)
            self.cpu_s += time.process_time() - began
            self.polls += 1
            follower.take(directive)

    def until_done(self, begin: Callable[[], PendingCall]) -> None:
        began = time.process_time()
        call = begin()
        self.cpu_s += time.process_time() - began
        while not call.done:
            self.poll_all()
        if call.error is not None:
            raise call.error


def ledger_round(count: int) -> tuple[float, int]:
    """CPU seconds, and polls, of one round of a ledger with so many replicas."""
    timed = Timed(count)
    ledger = timed.ledger
    while not all(follower.admitted for follower in timed.followers):
        timed.poll_all()
    token = ledger.acquire("benchmark", timed.now).token
    timed.until_done(lambda: ledger.connect(token, {}, timed.now))
    timed.poll_all()
    timed.cpu_s, timed.polls = 0.0, 0
    round_id = ledger.open_round(token, RoundOptions(persist=False), timed.now)
    for _ in range(PAYLOADS):
        timed.until_done(lambda: ledger.send(token, round_id, {}, timed.now))
    timed.until_done(lambda: ledger.close_round(token, round_id, None, timed.now))
    timed.poll_all()
    return timed.cpu_s, timed.polls


@dataclass(slots=True)
class Followers:
    """Some of the replicas, in a process of their own."""

    first: int
    count: int
    members: list[InstantMember] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        handle = CallHandle(serve.get_deployment_handle("controller", app_name=APP))
        for number in range(self.first, self.first + self.count):
            member = InstantMember()
            follower = Follower(
                replica_id=f"replica-{number}",
                incarnation=f"replica-{number}",
                member=member,
                poll=handle.poll.remote,
            )
            self.members.append(member)
            self.tasks.append(asyncio.create_task(follower.run()))

    async def serving(self) -> int:
        for task in self.tasks:
            if task.done():
                task.result()
        return sum(member.admitted for member in self.members)


@dataclass(slots=True)
class Asker:
    """Somebody who looks at the fleet again and again."""

    took_s: list[float] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        handle = CallHandle(serve.get_deployment_handle("controller", app_name=APP))
        self.task = asyncio.create_task(self._ask(handle.fleet.remote))

    async def _ask(self, ask: Callable[[], Awaitable[object]]) -> None:
        while True:
            began = time.perf_counter()
            await ask()
            self.took_s.append(time.perf_counter() - began)
            await asyncio.sleep(ASK_S)

    async def taken(self) -> list[float]:
        taken, self.took_s = self.took_s, []
        return taken


class MeasuredController(Controller):
    """Serve's deployment class, which says what its process has taken."""

    async def cpu_s(self) -> float:
        return time.process_time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians over the rounds."""

    round_s: float
    round_cpu_s: float
    idle_cpu: float  # share of a core between rounds
    joined_s: float  # until all serve, from the start of the first
    join_cpu_s: float
    fleet_s: float
    fleet_99_s: float
    alone: dict[str, tuple[float, int]]  # between rounds, by question: seconds, bytes of JSON


async def serve_rounds(count: int, processes: int, directory: str) -> Measured:
    """Rounds of the controller as Serve runs it."""
    deployment = serve.deployment(MeasuredController, name="controller", max_ongoing_requests=1_000_000)
    application = deployment.options(ray_actor_options={"num_cpus": 0}).bind(
        config=LedgerConfig(min_replicas=1),
        state_dir=f"{directory}/state",
        store_dir=f"{directory}/store",
        is_alive=lambda replica_id: True,
        kill=lambda replica_id: None,
    )
    await asyncio.to_thread(serve.run, application, name=APP, route_prefix=None)
    handle = CallHandle(serve.get_deployment_handle("controller", app_name=APP))
    remote = ray.remote(num_cpus=0)
    share = -(-count // processes)
    firsts = range(0, count, share)
    followers = [remote(Followers).remote(first, min(share, count - first)) for first in firsts]
    before = await handle.cpu_s.remote()
    await asyncio.gather(*[each.start.remote() for each in followers])
    began = time.monotonic()
    while sum(await asyncio.gather(*[each.serving.remote() for each in followers])) < count:
        if time.monotonic() - began > START_S:
            raise TimeoutError(f"not all of {count} replicas serve after {START_S:g} s")
        await asyncio.sleep(0.1)
    joined_s = time.monotonic() - began
    join_cpu_s = await handle.cpu_s.remote() - before
    asker = remote(Asker).remote()
    await asker.start.remote()
    lease = await handle.acquire.remote("benchmark")
    await handle.connect.remote(lease.token, {})
    await asyncio.sleep(3.0)
    before = await handle.cpu_s.remote()
    await asyncio.sleep(5.0)
    idle = (await handle.cpu_s.remote() - before) / 5.0
    await asker.taken.remote()
    took, cpu = [], []
    for _ in range(ROUNDS):
        began, cpu_before = time.perf_counter(), await handle.cpu_s.remote()
        round_id = await handle.open_round.remote(lease.token, RoundOptions(persist=False))
        for _ in range(PAYLOADS):
            await handle.send.remote(lease.token, round_id, {})
        await handle.close_round.remote(lease.token, round_id, None)
        took.append(time.perf_counter() - began)
        cpu.append(await handle.cpu_s.remote() - cpu_before)
    taken = sorted(await asker.taken.remote())
    await asyncio.sleep(1.0)
    alone = {
        name: await asked(getattr(handle, name).remote) for name in ("health", "fleet", "rounds", "events")
    }
    for each in (*followers, asker):
        ray.kill(each)
    await asyncio.to_thread(serve.delete, APP)
    return Measured(
        round_s=statistics.median(took),
        round_cpu_s=statistics.median(cpu),
        idle_cpu=idle,
        fleet_s=statistics.median(taken),
        fleet_99_s=taken[int(0.99 * (len(taken) - 1))],
        joined_s=joined_s,
        join_cpu_s=join_cpu_s,
        alone=alone,
    )


async def asked(ask: Callable[[], Awaitable[object]]) -> tuple[float, int]:
    """Seconds of a question between rounds (median of ten), and the bytes of its answer as JSON."""
    took_s = []
    for _ in range(10):
        began = time.perf_counter()
        answer = await ask()
        took_s.append(time.perf_counter() - began)
    return statistics.median(took_s), len(TypeAdapter(Any).dump_json(answer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ledger", type=int, nargs="*", default=[])
    parser.add_argument("--serve", type=int, nargs="*", default=[])
    parser.add_argument("--processes", type=int, default=2, help="of the replicas")
    options = parser.parse_args()
    if options.ledger:
        print("| replicas | CPU of one round in the ledger (s) | polls | one poll (us) |\n|---|---|---|---|")
        for count in options.ledger:
            cpu_s, polls = ledger_round(count)
            print(f"| {count} | {cpu_s:.4f} | {polls} | {1e6 * cpu_s / polls:.0f} |", flush=True)
    if options.serve:
        with tempfile.TemporaryDirectory() as directory:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            serve.start(http_options={"location": "NoServer"})
            print(
                "| replicas | all serve after (s) | CPU of the controller until then (s) "
                "| round (s) | CPU of the controller (s) "
                "| its idle share of a core | `/fleet` during rounds: median, 99 % (ms) "
                "| between rounds, ms and kB of JSON: health, fleet, rounds, events |\n"
                "|---|---|---|---|---|---|---|---|"
            )
            for count in options.serve:
                path = Path(directory) / str(count)
                path.mkdir()
                seen = asyncio.run(serve_rounds(count, options.processes, str(path)))
                alone = "; ".join(
                    f"{1000 * took:.0f}, {size / 1e3:.1f}" for took, size in seen.alone.values()
                )
                print(
                    f"| {count} | {seen.joined_s:.1f} | {seen.join_cpu_s:.1f} "
                    f"| {seen.round_s:.2f} | {seen.round_cpu_s:.2f} "
                    f"| {seen.idle_cpu:.2f} | {1000 * seen.fleet_s:.0f}, {1000 * seen.fleet_99_s:.0f} "
                    f"| {alone} |",
                    flush=True,
                )
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
