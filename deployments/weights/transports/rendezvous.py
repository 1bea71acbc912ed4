"""The rendezvous of the transports that form a group of ranks (`gloo`, `nccl`).

    rank 0      opens a TCPStore at the rendezvous address ─┐
    workers     probe the address until it is open ─────────┤
    all ranks   set their payload, wait for all others   ◄──┘

torch's own ways to form a group also wait for the members, but nothing can end that wait. They are called
after this, when no member is missing.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from deployments.errors import TransferFailed
from deployments.weights.wire.chunk_layout import DescribedTensors

_POLL_S = 0.01
_PROBE_TIMEOUT_S = 1.0


@dataclass(kw_only=True)
class RendezvousInfo(DescribedTensors, WeightTransferInitInfo):
    """Where the group forms, and the parameters on which both sides must agree: the sender's."""

    master_address: str
    master_port: int
    rank_offset: int  # of a replica's first worker
    world_size: int
    timeout_s: float


def rendezvous(
    info: RendezvousInfo, rank: int, check: Callable[[], None], payload: str = ""
) -> tuple[PrefixStore, list[str]]:
    """Wait until all members have joined at the address that rank 0 opens.

    Args:
        check: raises to end the wait; called every few milliseconds.
        payload: passed to all other members.

    Returns:
        The store that the members share, and the payload of each, by rank.

    Raises:
        TransferFailed: not all joined within `timeout_s`.
    """
    deadline = time.monotonic() + info.timeout_s

    def wait_for(reached: Callable[[], bool], problem: str) -> None:
        while not reached():
            check()
            if time.monotonic() > deadline:
                raise _incomplete(info, problem)
            time.sleep(_POLL_S)

    if rank != 0:
        wait_for(lambda: _probe(info), "rank 0 has not opened the rendezvous")
    try:
        timeout = timedelta(seconds=info.timeout_s)
        tcp_store = TCPStore(
            info.master_address, info.master_port, info.world_size, rank == 0, timeout, wait_for_workers=False
        )
        store = PrefixStore("slipstream", tcp_store)
        keys = [f"member/{peer}" for peer in range(info.world_size)]
        store.set(keys[rank], payload)
        wait_for(lambda: bool(store.check(keys)), "not all of them joined")
        return store, [store.get(key).decode() for key in keys]
    except RuntimeError as error:  # torch has no finer class
        raise _incomplete(info, str(error).splitlines()[0]) from error


def _probe(info: RendezvousInfo) -> bool:
    try:
        socket.create_connection((info.master_address, info.master_port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _incomplete(info: RendezvousInfo, problem: str) -> TransferFailed:
    return TransferFailed(
        f"{info.world_size} members were expected at {info.master_address}:{info.master_port} within "
        f"{info.timeout_s:g} s: {problem}"
    )
