"""Transport `gloo`: hosts without a common GPU fabric. A packed broadcast over a stateless Gloo group."""

import ipaddress
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from deployments.weights.arrival import Arrival, packed
from deployments.weights.meeting import (
    DEFAULT_TIMEOUT_S,
    BroadcastInfo,
    BroadcastReceiver,
    BroadcastSender,
    BrokenGroup,
    MeetingInfo,
)

DEFAULT_CHUNK_BYTES = 64 << 20


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """`world_size` counts the publisher (rank 0) and every worker of every replica."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


class GlooWeightTransferEngine(BroadcastReceiver[ProcessGroupGloo]):
    def join(self, info: MeetingInfo, rank: int) -> ProcessGroupGloo:
        return form_group(info, rank)

    def receive(self, update_info: BroadcastInfo) -> Iterator[Arrival]:
        group, chunks = self.expected(update_info)
        for chunk in chunks:
            block = torch.empty(chunk.size_bytes, dtype=torch.uint8)
            broadcast(group, block)
            yield packed(chunk, block)


class GlooTrainerWeightTransferEngine(BroadcastSender[GlooTrainerInitInfo, ProcessGroupGloo]):
    init_info_cls = GlooTrainerInitInfo

    def form(self, info: MeetingInfo) -> ProcessGroupGloo:
        return form_group(info, 0)

    def send(self, receiving: Future[None] | None) -> None:
        for index, chunk in enumerate(self.packer.chunks):
            block = torch.empty(chunk.size_bytes, dtype=torch.uint8)
            self.packer.pack(index, block)
            if receiving is not None and receiving.done():
                receiving.result()  # refused before the first byte: do not wait for peers
            broadcast(self.group, block)


def form_group(info: MeetingInfo, rank: int) -> ProcessGroupGloo:
    """Join the group; rank 0 opens the meeting point. Waits for all members, up to `timeout_s`."""
    timeout = timedelta(seconds=info.timeout_s)
    store = TCPStore(
        info.master_address,
        info.master_port,
        world_size=info.world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    options: Any = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(info.master_address))]
    return ProcessGroupGloo(PrefixStore("slipstream", store), rank, info.world_size, options)


def broadcast(group: ProcessGroupGloo, block: torch.Tensor) -> None:
    """Send or receive one block (uint8, host memory) from rank 0.

    Raises:
        BrokenGroup: a peer is gone, or did not come within the group's timeout.
    """
    try:
        group.broadcast([block], _from_publisher()).wait()
    except RuntimeError as error:  # Gloo has no finer class
        raise BrokenGroup(f"the transfer group broke: {str(error).splitlines()[0]}") from error


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
