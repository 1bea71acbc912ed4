"""Transport `shm`: processes of one host, CPU. Named segments of shared memory, one a chunk.

The publisher writes a chunk into a new segment and sends its name; every replica maps the same
pages, so a version is in host memory once however many replicas there are. A mapping outlives
the name, so the publisher removes each segment as soon as all replicas have opened it, and a
publisher that dies leaves nothing that a replica needs.
"""

import mmap
import os
import re
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.weights.packing import Chunk, describe, pack, parse, plan_chunks
from deployments.weights.staging import StagedWeightTransferEngine

DIRECTORY = Path("/dev/shm")
PREFIX = "slipstream"
DEFAULT_CHUNK_BYTES = 128 << 20
_NAME = re.compile(rf"{PREFIX}-(\d+)-[0-9a-f]{{32}}")


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: a payload carries all that its reader needs."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One chunk: the segment that holds it, and what lies in it."""

    segment: str
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "shm"

    chunk_bytes: int = DEFAULT_CHUNK_BYTES


class ShmWeightTransferEngine(StagedWeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    one_payload = False

    def connect(self, init_info: ShmInitInfo) -> None:
        pass

    def receive(self, update_info: ShmUpdateInfo) -> Iterator[tuple[Chunk, torch.Tensor]]:
        tensors = parse(update_info.names, update_info.dtype_names, update_info.shapes)
        chunks = plan_chunks(tensors, _UNBOUNDED)
        if len(chunks) != 1:
            raise ValueError(f"a payload must describe at least one tensor, got {len(tensors)}")
        yield chunks[0], open_segment(update_info.segment, chunks[0].size_bytes)


class ShmTrainerWeightTransferEngine(TrainerWeightTransferEngine[ShmTrainerInitInfo]):
    """Sends a source's tensors chunk by chunk; while one is taken in, the next is packed."""

    init_info_cls = ShmTrainerInitInfo

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool, chunk_bytes: int
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._chunk_bytes = chunk_bytes

    @classmethod
    def trainer_init(
        cls,
        init_info: ShmTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        if source is None:
            raise ValueError("transport 'shm' needs a WeightSource, got None")
        engine = cls(
            client=client, source=source, is_sender=init_info.is_sender, chunk_bytes=init_info.chunk_bytes
        )
        if engine.is_sender:
            remove_orphans()
            client.init_weight_transfer_engine({})
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        tensors = iter(self.source)
        if not self.is_sender:
            for _ in tensors:  # materializing is a collective: every rank takes part
                pass
            return
        metadata = [(meta.name, meta.dtype, meta.shape) for meta in self.source.metadata()]
        self.client.start_weight_update()
        with ThreadPoolExecutor(max_workers=1) as calls:
            sending: Future[None] | None = None
            for chunk in plan_chunks(metadata, self._chunk_bytes):
                name, block = create_segment(chunk.size_bytes)
                try:
                    pack(chunk, tensors, block)
                    if sending is not None:
                        sending.result()
                except BaseException:  # nobody else knows the segment's name yet
                    remove_segment(name)
                    raise
                sending = calls.submit(self._send, name, chunk)
            if sending is not None:
                sending.result()
        self.client.finish_weight_update()

    def _send(self, segment: str, chunk: Chunk) -> None:
        described = describe([(entry.name, entry.dtype, entry.shape) for entry in chunk.entries])
        try:
            self.client.update_weights({"segment": segment, **described})
        finally:
            remove_segment(segment)


_UNBOUNDED = 1 << 62  # a payload is one chunk, whatever its size


def create_segment(size_bytes: int) -> tuple[str, torch.Tensor]:
    """A new named segment, mapped: its name and its bytes (uint8 [size_bytes]).

    Raises:
        OSError: there is no room; the message has the numbers.
    """
    name = f"{PREFIX}-{os.getpid()}-{uuid.uuid4().hex}"
    descriptor = os.open(DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            # Without this, writing to a full tmpfs ends the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            remove_segment(name)
            free = os.statvfs(DIRECTORY).f_bavail * os.statvfs(DIRECTORY).f_frsize
            raise OSError(
                error.errno,
                f"a chunk of {size_bytes} bytes does not fit into {DIRECTORY} ({free} bytes free); "
                "lower weights.chunk_bytes, or give the container more shared memory",
            ) from error
        mapping = mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    return name, torch.frombuffer(mapping, dtype=torch.uint8)


def open_segment(name: str, size_bytes: int) -> torch.Tensor:
    """Map an existing segment for reading (uint8 [size_bytes]); it stays after its name is gone.

    Raises:
        ValueError: no such segment, or one of another size; names outside our own are refused.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(f"expected the name of a Slipstream segment, got {name!r}")
    try:
        descriptor = os.open(DIRECTORY / name, os.O_RDONLY)
    except FileNotFoundError as error:
        raise ValueError(f"segment {name!r} does not exist on this host") from error
    try:
        actual = os.fstat(descriptor).st_size
        if actual != size_bytes:
            raise ValueError(
                f"segment {name!r} must have {size_bytes} bytes for its tensors, it has {actual}"
            )
        # ACCESS_COPY: torch wants a writable buffer; nothing is written, so no page is copied.
        return torch.frombuffer(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def remove_segment(name: str) -> None:
    (DIRECTORY / name).unlink(missing_ok=True)


def remove_orphans() -> None:
    """Remove segments of publishers that died on this host."""
    for path in DIRECTORY.glob(f"{PREFIX}-*"):
        match = _NAME.fullmatch(path.name)
        if match is not None and not Path(f"/proc/{match.group(1)}").exists():
            path.unlink(missing_ok=True)
