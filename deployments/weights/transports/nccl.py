"""Transport `nccl`: GPUs and hosts. A packed broadcast; rank 0 is the publisher.

Both sides have two buffers and a stream for NCCL:

    publisher   pack chunk i+1 (its own stream)   | broadcast chunk i (NCCL's stream)
    worker      load chunk i (the staging stream) | receive chunk i+1 (NCCL's stream)

Events order the streams on the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from deployments.weights.transports.broadcast import (
    BroadcastInfo,
    BroadcastReceiver,
    BroadcastSender,
    BroadcastTrainerInitInfo,
)
from deployments.weights.transports.nccl_communicator import BUFFERS, NcclGroup
from deployments.weights.transports.registry import TRANSPORTS
from deployments.weights.transports.rendezvous import RendezvousInfo
from deployments.weights.wire.chunk_layout import ReceivedChunk, largest, packed_chunk


@dataclass
class NcclTrainerInitInfo(BroadcastTrainerInitInfo):
    """The connection of a trainer rank."""

    backend: ClassVar[str] = "slipstream_nccl"

    chunk_bytes: int = TRANSPORTS["nccl"].chunk_bytes


class NcclWeightTransferEngine(BroadcastReceiver[NcclGroup]):
    """The worker's half."""

    def join_group(self, info: RendezvousInfo, rank: int, check: Callable[[], None]) -> NcclGroup:
        return NcclGroup(info, rank, self.device, check)

    def receive(self, update_info: BroadcastInfo) -> Iterator[ReceivedChunk]:
        group, chunks = self.group_and_chunks()
        group.reserve(largest(chunks))
        finished = False
        try:
            # One broadcast ahead, ordered after the loads of chunk i-1, which used the same buffer, on the
            # current stream. But where staging pauses between chunks, no broadcast may run in the pause.
            ahead = 1 if self.share == 1.0 else 0
            started = 0
            for index, chunk in enumerate(chunks):
                while started < min(index + 1 + ahead, len(chunks)):
                    group.start(started, chunks[started].size_bytes)
                    started += 1
                group.wait(index)
                yield packed_chunk(chunk, group.buffer(index, chunk.size_bytes))
            group.finish()
            finished = True
        finally:
            if not finished:  # peers wait in broadcasts that this worker will not join
                self.abort()


class NcclTrainerWeightTransferEngine(BroadcastSender[NcclTrainerInitInfo, NcclGroup]):
    """The trainer's half."""

    init_info_cls = NcclTrainerInitInfo

    def open_group(self, info: RendezvousInfo, check: Callable[[], None]) -> NcclGroup:
        return NcclGroup(info, 0, torch.device("cuda", torch.cuda.current_device()), check)

    def broadcast(self, check: Callable[[], None]) -> None:
        group, chunks = self.group, self.packer.chunks
        group.reserve(largest(chunks))
        for index, chunk in enumerate(chunks):
            if index >= BUFFERS:
                group.wait(index - BUFFERS, check)
            # On the caller's stream, that of the tensors: their memory may be freed right afterwards.
            self.packer.pack(index, group.buffer(index, chunk.size_bytes))
            group.start(index, chunk.size_bytes, check)
        for index in range(max(len(chunks) - BUFFERS, 0), len(chunks)):
            group.wait(index, check)
        group.finish()
