"""What a round of differences takes over a slow link beside a whole one, with Gloo (NCCL: `deltas_nccl`).

    python -m benchmarks.deltas [--rate 1gbit] [--mib 512] [--changed 0.01 0.03 0.05]

The publisher and each receiver are on hosts of their own (`benchmarks/hosts.py`) whose links are shaped. The
publisher packs tensors in bfloat16 with their digests, as a trainer does; receivers compare the digests, and
drop what arrives. Whole rounds and rounds of differences take turns.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer import ParamMeta

from benchmarks.hosts import LINK, Hosts, enter_network
from benchmarks.links import MIB, PORT, TIMEOUT_S, Barrier
from deployments.vllm_versions import Source
from deployments.weights.transports.broadcast import as_deltas
from deployments.weights.transports.gloo import GlooGroup, GlooTrainerWeightTransferEngine
from deployments.weights.transports.kept_chunks import KeptChunks
from deployments.weights.transports.registry import TRANSPORTS
from deployments.weights.transports.rendezvous import RendezvousInfo
from deployments.weights.wire.chunk_layout import Chunk, describe
from deployments.weights.wire.digest import inspect

TENSOR = (4096, 1024)  # 8 MiB
CHUNK_BYTES = TRANSPORTS["gloo"].chunk_bytes
Figures = tuple[float, int, float]  # of a round: seconds, bytes that the link sent, seconds of processor time
Plan = list[tuple[float, bool]]  # of each round: the share of elements that has changed, and if it is whole


class Weights(Source):
    """Random numbers, as a trainer's own memory.

    Args:
        shapes: of its tensors, by name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: str = "cpu") -> None:
        self._tensors = {
            name: torch.randn(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()
        }
        self._resident = list(self._tensors.values())

    def specs(self) -> list[ParamMeta]:
        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())

    def resident(self) -> list[torch.Tensor]:
        return self._resident

    def change(self, share: float) -> None:
        """Move this share of the elements to a neighbouring number."""
        for each in self._resident:
            each.view(torch.int16).bitwise_xor_(torch.rand(each.shape, device=each.device) < share)


def member(pid: int, rank: int, info: RendezvousInfo, plan: Plan) -> list[Figures]:
    """One process of the group, on the host of process `pid`."""
    enter_network(pid)
    torch.set_num_threads(1)
    group = GlooGroup(info, rank, lambda: None)
    barrier = Barrier(group)
    weights = Weights(dict.fromkeys(info.names if rank == 0 else [], TENSOR))
    sender = GlooTrainerWeightTransferEngine(
        client=cast(Any, None), source=weights, is_sender=True, chunk_bytes=CHUNK_BYTES
    )
    sender._group = group  # the members meet by themselves
    figures = []
    for share, whole in plan:
        weights.change(share)
        if whole:
            group.kept = KeptChunks()
        barrier.wait()
        began, cpu_s, before = time.monotonic(), time.process_time(), sent_bytes()
        sender.packer.begin()
        sender.send(None) if rank == 0 else receive(group, info.chunks())
        barrier.wait()
        ended = time.monotonic()
        figures.append((ended - began, sent_bytes() - before, time.process_time() - cpu_s))
    return figures


def sent_bytes() -> int:
    """What the link of this thread's network has sent."""
    with open("/proc/thread-self/net/dev") as interfaces:
        (line,) = [line for line in interfaces if line.strip().startswith(f"{LINK}:")]
    return int(line.split(":")[1].split()[8])


def receive(group: GlooGroup, chunks: tuple[Chunk, ...]) -> None:
    """As `BroadcastReceiver`, and the comparison of digests that follows."""
    for received in as_deltas(group, chunks):
        assert torch.equal(inspect(received.read()).digests, cast(torch.Tensor, received.sent))
    group.finish()


def measured(receivers: int, rate: str, mib: int, plan: Plan) -> tuple[list[Figures], list[Figures]]:
    """Of the publisher and of the first receiver."""
    names = [str(number) for number in range(mib * MIB // (2 * TENSOR[0] * TENSOR[1]))]
    with Hosts.made(receivers + 1) as hosts:
        for host in hosts:
            host.shape(rate)
        info = RendezvousInfo(
            master_address=hosts[0].address,
            master_port=PORT,
            rank_offset=1,
            world_size=receivers + 1,
            timeout_s=TIMEOUT_S,
            chunk_bytes=CHUNK_BYTES,
            **describe([(name, torch.bfloat16, TENSOR) for name in names]),
        )
        forks = multiprocessing.get_context("fork")  # which have all imports done
        with ProcessPoolExecutor(receivers + 1, forks) as pool:
            members = [pool.submit(member, host.pid, rank, info, plan) for rank, host in enumerate(hosts)]
            first, second = (each.result(len(plan) * TIMEOUT_S) for each in members[:2])
            return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description="Rounds of differences beside whole ones, with Gloo.")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--changed", type=float, nargs="+", default=[0.01, 0.03, 0.05])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=1, help="that receive")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    plan = [(0.0, True), *((share, whole) for share in arguments.changed for whole in (True, False) * rounds)]
    both = measured(arguments.hosts, arguments.rate, arguments.mib, plan)
    print("| changed | sent | seconds | MiB | processor time: publisher, a receiver (s) | bytes | seconds |")
    print("|---|---|---|---|---|---|---|")
    for number, share in enumerate(arguments.changed):
        first = 1 + 2 * rounds * number
        whole_s = whole_mib = 0.0
        for kind, offset in (("all", 0), ("differences", 1)):
            sent, received = (figures[first + offset : first + 2 * rounds : 2] for figures in both)
            seconds, sizes, cpu_s = zip(*sent, strict=True)
            receiver_s = median(each[2] for each in received)
            middle_s, mib = median(seconds), median(sizes) / MIB
            whole_s, whole_mib = whole_s or middle_s, whole_mib or mib
            took = f"{min(seconds):.2f} to {max(seconds):.2f} | {mib:.1f}"
            cpu = f"{median(cpu_s):.2f}, {receiver_s:.2f}"
            beside = f"1/{whole_mib / mib:.1f} | 1/{whole_s / middle_s:.1f}"
            print(f"| {share:.0%} | {kind} | {took} | {cpu} | {beside} |", flush=True)


if __name__ == "__main__":
    main()
