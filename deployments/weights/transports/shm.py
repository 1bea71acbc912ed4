"""Transport `shm`: processes of one host, CPU. One named segment of shared memory per chunk.

Every replica maps the same pages: one copy of a version in host memory. Mappings outlive the name, removed
once all replicas have opened the segment.
"""

import mmap
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.host.shared_memory import create_mapping, open_mapping, remove_orphans, remove_segment
from deployments.weights.staging.transfer_engine import StagedWeightTransferEngine
from deployments.weights.transports.registry import TRANSPORTS
from deployments.weights.transports.weight_sender import WeightSender
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk, describe, layout, packed_chunk


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """A payload describes itself."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    segment: str
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "shm"

    chunk_bytes: int = TRANSPORTS["shm"].chunk_bytes


class ShmWeightTransferEngine(StagedWeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    one_payload = False

    def connect(self, init_info: ShmInitInfo) -> None:
        pass

    def receive(self, update_info: ShmUpdateInfo) -> Iterator[ReceivedChunk]:
        chunks = layout(update_info.names, update_info.dtype_names, update_info.shapes, sys.maxsize)
        if len(chunks) != 1:
            raise ValueError(f"a payload must describe at least one tensor, got {len(update_info.names)}")
        yield packed_chunk(chunks[0], open_segment(update_info.segment, chunks[0].size_bytes))


class ShmTrainerWeightTransferEngine(WeightSender[ShmTrainerInitInfo]):
    """One payload per chunk; the next is packed while replicas receive."""

    init_info_cls = ShmTrainerInitInfo

    def connect(self, init_info: ShmTrainerInitInfo) -> None:
        self._segments: set[str] = set()
        if self.is_sender:
            remove_orphans()
            self.client.init_weight_transfer_engine({})

    def transfer(self, calls: ThreadPoolExecutor) -> None:
        receiving: Future[None] | None = None
        for index, chunk in enumerate(self.packer.chunks):
            segment, mapping = create_mapping(chunk.size_bytes)
            self._segments.add(segment)
            self.packer.pack(index, torch.frombuffer(mapping, dtype=torch.uint8))
            if receiving is not None:
                receiving.result()
            receiving = calls.submit(self._send_segment, segment, chunk)
        if receiving is not None:
            receiving.result()

    def abandon_round(self) -> None:
        while self._segments:  # a late receiver finds none
            remove_segment(self._segments.pop())

    def shutdown(self) -> None:
        self.abandon_round()

    def _send_segment(self, segment: str, chunk: Chunk) -> None:
        described = describe([(entry.name, entry.dtype, entry.shape) for entry in chunk.entries])
        try:
            self.client.update_weights(asdict(ShmUpdateInfo(segment=segment, **described)))
        finally:
            remove_segment(segment)
            self._segments.discard(segment)


def open_segment(name: str, size_bytes: int) -> torch.Tensor:
    # torch requires writable memory; nothing is written, so no page is copied.
    return torch.frombuffer(open_mapping(name, mmap.ACCESS_COPY, size_bytes), dtype=torch.uint8)
