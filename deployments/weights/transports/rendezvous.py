"""The rendezvous of the transports that form a group of ranks (`gloo`, `nccl`).

    rank 0      opens a TCPStore at the rendezvous address ─┐
    workers     probe the address until it is open ─────────┤
    all ranks   set their payload, wait for all others   ◄──┘

torch's own ways to form a group also wait for the members, but nothing can end that wait. They are called
after this, when no member is missing.
"""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from deployments.errors import TransferFailed
from deployments.weights.transports.roll_call import HOST_S
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
        TransferFailed: not all joined within `timeout_s`; names those that did not.
    """
    # Rank 0 has the store: it leaves after those that ask there who is missing.
    deadline = time.monotonic() + info.timeout_s + (HOST_S if rank == 0 else 0.0)
    # In a thread of its own: the store's calls wait for its host, which may stand still, and cannot be ended.
    meeting = _Meeting(info, rank, payload, deadline)
    threading.Thread(target=meeting.run, name="rendezvous", daemon=True).start()
    try:
        while not meeting.over.wait(_POLL_S):
            check()
            if time.monotonic() > deadline + HOST_S:
                raise TransferFailed(f"{_expected(info)}: the rendezvous does not answer", (0,))
    finally:
        meeting.abandoned = True
    if meeting.failure is not None:
        raise meeting.failure
    assert meeting.store is not None
    return meeting.store, meeting.payloads


class _Meeting:
    """One member's part."""

    def __init__(self, info: RendezvousInfo, rank: int, payload: str, deadline: float) -> None:
        self._info, self._rank, self._payload, self._deadline = info, rank, payload, deadline
        self.over = threading.Event()
        self.abandoned = False
        self.store: PrefixStore | None = None
        self.payloads: list[str] = []
        self.failure: TransferFailed | None = None

    def run(self) -> None:
        try:
            self._join()
        except TransferFailed as error:
            self.failure = error
        except RuntimeError as error:  # torch has no finer class
            self.failure = TransferFailed(f"{_expected(self._info)}: {str(error).splitlines()[0]}")
        self.over.set()

    def _join(self) -> None:
        info, world_size = self._info, self._info.world_size
        if self._rank != 0:
            self._wait_for(lambda: _probe(info), lambda: [0])
        timeout = timedelta(seconds=info.timeout_s)
        host = self._rank == 0
        tcp_store = TCPStore(
            info.master_address, info.master_port, world_size, host, timeout, wait_for_workers=False
        )
        store = PrefixStore("slipstream", tcp_store)
        keys = [f"member/{peer}" for peer in range(world_size)]
        store.set(keys[self._rank], self._payload)
        self._wait_for(
            lambda: bool(store.check(keys)),
            lambda: [peer for peer, key in enumerate(keys) if not store.check([key])],
        )
        self.payloads = [store.get(key).decode() for key in keys]
        self.store = store

    def _wait_for(self, reached: Callable[[], bool], absent: Callable[[], list[int]]) -> None:
        while not reached():
            if self.abandoned or time.monotonic() > self._deadline:
                raise _incomplete(self._info, absent())
            time.sleep(_POLL_S)


def _probe(info: RendezvousInfo) -> bool:
    try:
        socket.create_connection((info.master_address, info.master_port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _incomplete(info: RendezvousInfo, absent: list[int]) -> TransferFailed:
    if absent == [0]:
        return TransferFailed(f"{_expected(info)}: rank 0 has not opened the rendezvous", (0,))
    return TransferFailed(f"{_expected(info)}: ranks {absent} did not join", tuple(absent))


def _expected(info: RendezvousInfo) -> str:
    address = f"{info.master_address}:{info.master_port}"
    return f"{info.world_size} members were expected at {address} within {info.timeout_s:g} s"
