"""What a round takes over slow links: several hosts beside one, with Gloo.

    python -m benchmarks.links [--rate 1gbit] [--mib 512] [--hosts 1 3] [--lost 0.01]

The publisher and each receiver are on hosts of their own (`benchmarks/hosts.py`) whose links are shaped. The
receivers drop what arrives. A link that carries each byte once takes as long for three as for one.
"""

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.hosts import LINK, Host, Hosts, enter_network
from deployments.weights.transports.gloo import GlooGroup
from deployments.weights.transports.registry import TRANSPORTS
from deployments.weights.transports.rendezvous import RendezvousInfo

PORT = 29500
TIMEOUT_S = 120.0
CHUNK = TRANSPORTS["gloo"].chunk_bytes
MIB = 1 << 20


def member(pid: int, rank: int, world_size: int, address: str, mib: int, rounds: int) -> list[float]:
    """One process of the group, on the host of process `pid`; the seconds of each round."""
    enter_network(pid)
    torch.set_num_threads(1)
    info = RendezvousInfo(
        master_address=address,
        master_port=PORT,
        rank_offset=1,
        world_size=world_size,
        timeout_s=TIMEOUT_S,
        chunk_bytes=CHUNK,
        names=[],
        dtype_names=[],
        shapes=[],
    )
    group = GlooGroup(info, rank, lambda: None)
    barrier = Barrier(group)
    seconds = []
    for _ in range(rounds):
        barrier.wait()
        began = time.monotonic()
        left = mib * MIB
        while left > 0:
            group.broadcast(torch.zeros(min(CHUNK, left), dtype=torch.uint8))
            left -= CHUNK
        barrier.wait()
        seconds.append(time.monotonic() - began)
    return seconds


class Barrier:
    """Waits until all members are here, by the store that they met in."""

    def __init__(self, group: GlooGroup) -> None:
        talk = group._roll_call._talk
        self._store, self._size, self._count = talk._store, talk._world_size, 0

    def wait(self) -> None:
        self._count += 1
        self._store.add("barrier", 1)
        while self._store.add("barrier", 0) < self._count * self._size:
            time.sleep(0.002)


def sent_bytes(host: Host) -> int:
    """What the host's link has sent since it was made."""
    (link,) = json.loads(host.run("ip", "-json", "-stats", "link", "show", LINK))
    return int(link["stats64"]["tx"]["bytes"])


def measured(receivers: int, rate: str, mib: int, rounds: int, lost: float) -> tuple[list[float], float]:
    """Seconds of each round, and how often the publisher's link carried each byte."""
    with Hosts.made(receivers + 1) as hosts:
        for host in hosts:
            host.shape(rate)
        for host in hosts[1:] if lost else ():
            host.lose(lost)
        before = sent_bytes(hosts[0])
        forks = multiprocessing.get_context("fork")  # which have all imports done
        with ProcessPoolExecutor(receivers + 1, forks) as pool:
            common = (receivers + 1, hosts[0].address, mib, rounds)
            members = [pool.submit(member, host.pid, rank, *common) for rank, host in enumerate(hosts)]
            seconds = members[0].result(rounds * TIMEOUT_S)
        return seconds, (sent_bytes(hosts[0]) - before) / (rounds * mib * MIB)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a round takes over slow links, with Gloo.")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--lost", type=float, default=0.0, help="share of a receiver's packets, each way")
    arguments = parser.parse_args()
    print("| hosts that receive | seconds of a round | beside the first line | bytes sent by the publisher |")
    print("|---|---|---|---|")
    first = None
    for receivers in arguments.hosts:
        seconds, times = measured(receivers, arguments.rate, arguments.mib, arguments.rounds, arguments.lost)
        middle = sorted(seconds)[len(seconds) // 2]
        first = middle if first is None else first
        took = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(f"| {receivers} | {took} | {middle / first:.2f} | {times:.2f} |", flush=True)


if __name__ == "__main__":
    main()
