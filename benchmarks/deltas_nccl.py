"""What a round of differences takes beside a whole one, with NCCL: publisher on GPU 0, a worker on GPU 1.

    python -m benchmarks.deltas_nccl [--networks nvlink sockets 10gbit] [--changed 0.01 0.03] [--keep host]

    nvlink      what NCCL chooses
    sockets     NCCL over this machine's loopback
    10gbit      NCCL over sockets to another network namespace, over a link of this rate (or another one);
                needs pyroute2 and root, or `unshare -Urn` before the command and no other network

Tensors have a model's shapes and random numbers. The worker compares digests and fills a second copy of the
weights, by the code of `staging: device`; there is no engine. First whole rounds of a publisher that keeps
nothing, then those of one that does.
"""

import argparse
import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

import torch

from benchmarks.deltas import Weights
from benchmarks.links import MIB, TIMEOUT_S, Barrier
from benchmarks.models import random_model
from benchmarks.trainer_process import free_port
from deployments.weights.staging.base import Staging, Tensors
from deployments.weights.staging.load_plan import LoadPlans
from deployments.weights.transports.broadcast import BroadcastInfo
from deployments.weights.transports.kept_chunks import KeptChunks
from deployments.weights.transports.nccl import (
    NcclGroup,
    NcclTrainerWeightTransferEngine,
    NcclWeightTransferEngine,
)
from deployments.weights.transports.registry import TRANSPORTS, KeepPublished
from deployments.weights.transports.rendezvous import RendezvousInfo
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk, describe
from deployments.weights.wire.digest import inspect
from deployments.weights.wire.digest_definition import Findings

CLONE_NEWNET = 0x40000000
HERE, THERE = "10.78.0.1", "10.78.0.2"
LINK, FAR_LINK = "slip-deltas", "eth0"
BURST_BYTES = 4 << 20
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Round:
    seconds: float
    size_bytes: int  # that arrived


class Shadow(Staging):
    """Tensors on the worker's GPU, filled as those of `DeviceStaging`."""

    def __init__(self, shapes: Shapes) -> None:
        self._tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes.items()
        }
        self._plans = LoadPlans()

    def release(self) -> None:
        self._plans.release()

    def begin(self) -> None:
        self._plans.discard()

    def replay(self, received: ReceivedChunk) -> Findings | None:
        return self._plans.replay(received)

    def holds(self, chunks: Sequence[Chunk]) -> bool:
        return all(map(self._plans.can_restore, chunks))

    def reopen(self) -> None:
        pass

    def restore(self, chunk: Chunk, block: torch.Tensor) -> None:
        self._plans.restore(chunk, block)

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        with self._plans.record(chunk, tensors):
            for name, tensor in tensors:
                self._tensors[name].copy_(tensor)

    def finalize(
        self, *, complete: bool, check_open: Callable[[], None], keep_drafter: bool = False
    ) -> list[str]:
        raise AssertionError("there is no model")

    def confirm(self, chunks: Sequence[Chunk]) -> None:
        self._plans.confirm(set(chunks))

    def swap(self) -> None:
        pass

    def drop(self) -> None:
        pass


class Worker(NcclWeightTransferEngine):
    """Receives without vLLM's configuration and threads."""

    def __init__(self, info: RendezvousInfo, group: NcclGroup, staging: Shadow) -> None:
        self._chunks, self._told, self._sent, self._group = info.chunks(), info.keeps, {}, group
        self.staging = staging

    def one_round(self) -> int:
        """Bytes that arrived. As `StagedWeightTransferEngine`: stages all chunks, then compares digests."""
        assert isinstance(self.staging, Shadow)
        self.staging.begin()
        sent, found, size_bytes = [], [], 0
        for received in self.receive(BroadcastInfo()):
            findings = self.staging.replay(received)
            if findings is None:
                findings = inspect(received.read())
                self.staging.add(received.chunk, received.named())
            assert received.sent is not None
            sent.append(received.sent)
            found.append(findings.digests)
            arrived = received.arrived_bytes
            size_bytes += received.chunk.size_bytes if arrived is None else arrived
        assert torch.equal(torch.cat(sent), torch.cat(found)), "digests differ"
        self.staging.confirm(self._chunks)
        return size_bytes


def member(
    rank: int,
    infos: Sequence[RendezvousInfo],
    plans: Sequence[Sequence[float]],
    keep: KeepPublished,
    shapes: Shapes,
    environment: Mapping[str, str],
) -> tuple[list[list[Round]], list[float]]:
    """One process of the group. For each connection its rounds, and the GiB that this member took."""
    os.environ.update(environment)
    torch.set_num_threads(4)
    torch.cuda.set_device(rank)
    weights = Weights(shapes if rank == 0 else {}, f"cuda:{rank}")
    shadow = Shadow(shapes if rank == 1 else {})
    results, memory = [], []
    for info, plan in zip(infos, plans, strict=True):
        torch.cuda.reset_peak_memory_stats()
        group = NcclGroup(info, rank, torch.device("cuda", rank), lambda: None)
        barrier = Barrier(cast(Any, group))
        one_round = _publisher(weights, group, info, keep) if rank == 0 else _worker(info, group, shadow)
        rounds = []
        for share in plan:
            weights.change(share)
            torch.cuda.synchronize()
            barrier.wait()
            began = time.monotonic()
            size_bytes = one_round()
            barrier.wait()
            rounds.append(Round(seconds=time.monotonic() - began, size_bytes=size_bytes))
        results.append(rounds)
        memory.append(torch.cuda.max_memory_allocated() / (1 << 30))
        group.abort()
        shadow.release()
        del group, one_round  # with their buffers
    return results, memory


def _publisher(
    weights: Weights, group: NcclGroup, info: RendezvousInfo, keep: KeepPublished
) -> Callable[[], int]:
    sender = NcclTrainerWeightTransferEngine(
        client=cast(Any, None), source=weights, is_sender=True, chunk_bytes=info.chunk_bytes
    )
    sender._group = group  # the members meet by themselves
    if info.keeps:
        group.kept = KeptChunks(in_host_memory=keep is KeepPublished.HOST)

    def one_round() -> int:
        sender.packer.begin()
        sender.send(None)
        assert sender.is_current(), "the round failed"
        return 0

    return one_round


def _worker(info: RendezvousInfo, group: NcclGroup, shadow: Shadow) -> Callable[[], int]:
    return Worker(info, group, shadow).one_round


@contextmanager
def linked(worker: ProcessPoolExecutor, rate: str) -> Iterator[None]:
    """Between this process's network and one of the worker's own, while that process lives.

    Raises:
        OSError: this user may not make one.
        ImportError: there is no pyroute2.
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    pid = worker.submit(leave_network).result()
    with IPRoute() as network:
        try:
            network.link("set", index=1, state="up")
            network.link("add", ifname=LINK, kind="veth", peer={"ifname": FAR_LINK, "net_ns_pid": pid})
            (link,) = network.link_lookup(ifname=LINK)
            network.addr("add", index=link, address=HERE, prefixlen=24)
            network.link("set", index=link, state="up")
            shape = {"rate": _bits(rate) // 8, "burst": BURST_BYTES, "latency": "100ms"}
            network.tc("add", "tbf", index=link, handle=0x10000, **shape)
            worker.submit(open_link).result()
        except NetlinkError as error:
            raise OSError(f"a link cannot be made: {error}") from error
        yield  # the kernel removes the link with the worker's network


def _bits(rate: str) -> int:
    for unit, times in (("gbit", 10**9), ("mbit", 10**6)):
        if rate.endswith(unit):
            return int(float(rate.removesuffix(unit)) * times)
    raise ValueError(f"expected 'nvlink', 'sockets' or a rate such as '10gbit', got {rate!r}")


def leave_network() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "this user may not make network namespaces")
    return os.getpid()


def open_link() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as network:
        (link,) = network.link_lookup(ifname=FAR_LINK)
        network.addr("add", index=link, address=THERE, prefixlen=24)
        for index in (1, link):
            network.link("set", index=index, state="up")


def measured(
    network: str, shapes: Shapes, plans: Sequence[Sequence[float]], keep: KeepPublished, chunk_bytes: int
) -> tuple[list[list[Round]], list[list[float]]]:
    """Of the connection without and with what was published, as the worker measured them; then the GiB of
    publisher and worker."""
    spawn = multiprocessing.get_context("spawn")
    environments: list[dict[str, str]] = [{}, {}]
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, spawn)) for _ in range(2)]
        address = "127.0.0.1"
        if network == "sockets":
            environments = [{**SOCKETS, "NCCL_SOCKET_IFNAME": "lo"}] * 2
        elif network != "nvlink":
            stack.enter_context(linked(pools[1], network))
            address = HERE
            environments = [{**SOCKETS, "NCCL_SOCKET_IFNAME": name} for name in (LINK, FAR_LINK)]
        info = RendezvousInfo(
            master_address=address,
            master_port=free_port(),
            rank_offset=1,
            world_size=2,
            timeout_s=TIMEOUT_S,
            chunk_bytes=chunk_bytes,
            **describe([(name, torch.bfloat16, shape) for name, shape in shapes.items()]),
        )
        infos = [info, replace(info, master_port=free_port(), keeps=True)]
        members = [
            pool.submit(member, rank, infos, plans, keep, shapes, environments[rank])
            for rank, pool in enumerate(pools)
        ]
        try:
            for each in as_completed(members):
                each.result()
        except BaseException:  # the other one would wait for it
            for process in (process for pool in pools for process in pool._processes.values()):
                process.kill()
            raise
        (_, first), (rounds, second) = (each.result() for each in members)
        return rounds, [first, second]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="8b")
    parser.add_argument("--networks", nargs="+", default=["nvlink", "sockets", "10gbit"])
    parser.add_argument("--changed", type=float, nargs="+", default=[0.01, 0.03, 0.1])
    parser.add_argument("--rounds", type=int, default=2, help="of each kind; one more comes first")
    parser.add_argument("--keep", type=KeepPublished, default=KeepPublished.DEVICE)
    parser.add_argument("--chunk-mb", type=int, default=TRANSPORTS["nccl"].chunk_bytes >> 20)
    arguments = parser.parse_args()
    model = random_model(arguments.size, 0, "meta")
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    times = arguments.rounds + 1
    plans = [[0.03] * times, [0.03] + [share for share in arguments.changed for _ in range(times)]]
    print("| network | changed | sent | seconds | MiB | bytes | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for network in arguments.networks:
        try:
            (whole, rounds), memory = measured(
                network, shapes, plans, arguments.keep, arguments.chunk_mb << 20
            )
        except (ImportError, OSError) as error:
            print(f"| {network} | not possible here: {type(error).__name__}: {error} |", flush=True)
            continue
        usual = _print(network, "", "all", whole[1:], None)
        _print(network, "", "all, kept for the first time", rounds[:1], usual)
        for number, share in enumerate(arguments.changed):
            first = 1 + number * times
            _print(network, f"{share:.0%}", "differences", rounds[first + 1 : first + times], usual)
        (before, after), (there, there_after) = memory
        print(f"GiB without and with what was published: publisher {before:.1f}, {after:.1f}; ", end="")
        print(f"worker {there:.1f}, {there_after:.1f}", flush=True)


def _print(network: str, changed: str, sent: str, rounds: Sequence[Round], usual: Round | None) -> Round:
    """A line, and its medians."""
    seconds = [each.seconds for each in rounds]
    middle = Round(seconds=median(seconds), size_bytes=round(median(each.size_bytes for each in rounds)))
    beside = " | "
    if usual is not None:
        beside = f"1/{usual.size_bytes / middle.size_bytes:.1f} | 1/{usual.seconds / middle.seconds:.2f}"
    took = f"{min(seconds):.3f} to {max(seconds):.3f} | {middle.size_bytes / MIB:.1f}"
    print(f"| {network} | {changed} | {sent} | {took} | {beside} |", flush=True)
    return middle


if __name__ == "__main__":
    main()
