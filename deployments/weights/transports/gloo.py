"""Transport `gloo`: hosts without a common GPU fabric. A packed broadcast over a stateless Gloo group."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Work
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from deployments.errors import TransferFailed
from deployments.weights.transports.registry import DEFAULT_TIMEOUT_S, TRANSPORTS, TrainerFacts
from deployments.weights.transports.rendezvous import (
    BroadcastInfo,
    BroadcastReceiver,
    BroadcastSender,
    MeetingInfo,
    meet,
)
from deployments.weights.wire.received_chunk import ReceivedChunk, packed_chunk

DEFAULT_CHUNK_BYTES = TRANSPORTS["gloo"].chunk_bytes
ABORTED = "the transfer group was aborted"
_SLICE_S = 0.02  # of a wait that an abort from another thread must be able to end


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """`world_size` counts the publisher (rank 0) and every worker of every replica."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


def trainer_init_info(facts: TrainerFacts) -> GlooTrainerInitInfo:
    """The connection of a trainer rank."""
    return GlooTrainerInitInfo(
        rank=facts.rank,
        master_address=facts.address,
        master_port=facts.port,
        world_size=facts.world_size,
        chunk_bytes=DEFAULT_CHUNK_BYTES if facts.chunk_bytes is None else facts.chunk_bytes,
        timeout_s=facts.timeout_s,
    )


class GlooGroup:
    """A group with a way out of its waits: ProcessGroupGloo's own `abort` does nothing.

    Raises:
        TransferFailed: not all members came within `timeout_s`.
    """

    def __init__(self, info: MeetingInfo, rank: int, check: Callable[[], None]) -> None:
        meeting, _ = meet(info, rank, check)
        try:
            self._group: ProcessGroupGloo | None = form_group(meeting, info, rank)
        except RuntimeError as error:  # torch has no finer class
            raise TransferFailed(f"the transfer group broke: {str(error).splitlines()[0]}") from error

    def broadcast(self, block: torch.Tensor, check: Callable[[], None] = lambda: None) -> None:
        """Send or receive one block (uint8, host memory) from rank 0.

        Args:
            check: raises when nobody will take part; called now and then.

        Raises:
            TransferFailed: a peer is gone, or did not come within the group's timeout, or `abort` was called.
        """
        group = self._group
        if group is None:
            raise TransferFailed(ABORTED)
        work = group.broadcast([block], _from_publisher())
        try:
            while not _ends_soon(work):
                check()
                if self._group is None:
                    raise TransferFailed(ABORTED)
        except BaseException:  # whatever ends the wait, the group must outlive its broadcast
            if not work.is_completed():
                threading.Thread(
                    target=_outlive, args=(group, work), name="gloo-abandoned", daemon=True
                ).start()
            raise

    def abort(self) -> None:
        """End the wait of the thread that broadcasts. Any thread may call it; the group is gone then."""
        self._group = None


def _ends_soon(work: Work) -> bool:
    """Wait for a slice of time. Raises TransferFailed if the broadcast has failed."""
    over = work.is_completed()
    try:
        work.wait(timedelta(seconds=_SLICE_S))
    except RuntimeError as error:  # the slice's end, or the broadcast's: torch has classes for neither
        if over:
            raise TransferFailed(f"the transfer group broke: {str(error).splitlines()[0]}") from error
        return False
    return True


def _outlive(group: ProcessGroupGloo, work: Work) -> None:
    """Keep an abandoned group until Gloo's thread comes out of the broadcast, at the group's timeout: its
    destructor waits for that thread, and everything else in this process would wait for the destructor."""
    with suppress(RuntimeError):
        work.wait()


class GlooWeightTransferEngine(BroadcastReceiver[GlooGroup]):
    def join(self, info: MeetingInfo, rank: int, check: Callable[[], None]) -> GlooGroup:
        return GlooGroup(info, rank, check)

    def receive(self, update_info: BroadcastInfo) -> Iterator[ReceivedChunk]:
        group, chunks = self.expected()
        for chunk in chunks:
            block = torch.empty(chunk.size_bytes, dtype=torch.uint8)
            group.broadcast(block)
            yield packed_chunk(chunk, block)


class GlooTrainerWeightTransferEngine(BroadcastSender[GlooTrainerInitInfo, GlooGroup]):
    init_info_cls = GlooTrainerInitInfo

    def form(self, info: MeetingInfo, check: Callable[[], None]) -> GlooGroup:
        return GlooGroup(info, 0, check)

    def broadcast(self, check: Callable[[], None]) -> None:
        for index, chunk in enumerate(self.packer.chunks):
            block = torch.empty(chunk.size_bytes, dtype=torch.uint8)
            self.packer.pack(index, block)
            check()
            self.group.broadcast(block, check)


def form_group(meeting: PrefixStore, info: MeetingInfo, rank: int) -> ProcessGroupGloo:
    options: Any = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=info.timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(info.master_address))]
    return ProcessGroupGloo(meeting, rank, info.world_size, options)


def _from_publisher() -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _own_address(master_address: str) -> str:
    """The address of this host that the meeting point can reach.

    Gloo's default is whatever the host name resolves to, which in containers is often nothing.
    """
    if ipaddress.ip_address(socket.gethostbyname(master_address)).is_loopback:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master_address, 9))  # no packet is sent
        return str(probe.getsockname()[0])
