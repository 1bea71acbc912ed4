"""The channel of transport `ipc`: a page of counters in shared memory, and GPU memory: the model's own
tensors, or two buffers for those that are gathered or cast."""

import base64
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, JsonValue, TypeAdapter, ValidationError
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from deployments.host.shared_memory import create_mapping, open_mapping
from deployments.protocol.errors import TransferFailed
from deployments.weights.transports.registry import DEFAULT_TIMEOUT_S
from deployments.weights.wire.chunk_layout import (
    Chunk,
    DescribedTensors,
    Entry,
    ReceivedChunk,
    largest,
    packed_chunk,
    view,
    write_digests,
)
from deployments.weights.wire.digest import prepare_inspection
from deployments.weights.wire.digest_definition import DIGEST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHandle:
    """A CUDA storage as torch's `_share_cuda_` returns it, with bytes in base64."""

    memory: str
    size_bytes: int
    offset_bytes: int
    counter: str  # torch's count of the storage's users, in shared memory
    counter_offset: int
    event: str
    sync: bool


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def share_memory(tensor: torch.Tensor) -> MemoryHandle:
    """The tensor's storage must outlive what opens it."""
    _, memory, size, offset, counter, counter_offset, event, sync = tensor.untyped_storage()._share_cuda_()
    return MemoryHandle(
        memory=base64.b64encode(memory).decode(),
        size_bytes=size,
        offset_bytes=offset,
        counter=base64.b64encode(counter).decode(),
        counter_offset=counter_offset,
        event=base64.b64encode(event).decode(),
        sync=sync,
    )


def open_memory(handle: MemoryHandle, device: torch.device) -> torch.Tensor:
    """Another process's storage (uint8 [handle.size_bytes]). Raises ValueError."""
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index,  # the sender may number its devices otherwise
            base64.b64decode(handle.memory),
            handle.size_bytes,
            handle.offset_bytes,
            base64.b64decode(handle.counter),
            handle.counter_offset,
            base64.b64decode(handle.event),
            handle.sync,
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the CUDA IPC handle cannot be opened: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


BUFFERS = 2


class TensorLocation(NamedTuple):
    storage: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBuffers:
    kind: Literal["buffers"] = "buffers"
    buffers: tuple[MemoryHandle, MemoryHandle]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentTensors:
    """The model's own n tensors, and the table of their digests (int64 [n])."""

    kind: Literal["tensors"] = "tensors"
    storages: tuple[MemoryHandle, ...]
    tensors: tuple[TensorLocation, ...]
    digests: MemoryHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    page: str
    memory: Annotated[PackedBuffers | ResidentTensors, Field(discriminator="kind")]


_CHANNELS: TypeAdapter[dict[str, Channel]] = TypeAdapter(dict[str, Channel])


def encode_channels(channels: Mapping[str, Channel]) -> JsonValue:
    return _CHANNELS.dump_python(dict(channels), mode="json")


def parse_channels(encoded: object) -> dict[str, Channel]:
    """By GPU UUID. Raises ValueError, naming the first wrong field."""
    try:
        return _CHANNELS.validate_python(encoded)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(["channels", *map(str, first["loc"])])
        raise ValueError(f"{path}: {first['msg']}, got {str(first['input'])[:200]}") from None


@dataclass(kw_only=True)
class IpcInitInfo(DescribedTensors, WeightTransferInitInfo):
    """Channels of all trainer ranks by GPU UUID, and the tensors of every round. Raises ValueError."""

    channels: Mapping[str, Channel]
    rank_offset: int
    world_size: int
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        self.channels = parse_channels(self.channels)
        if not self.channels:
            raise ValueError("channels: expected that of one trainer rank at least, got none")

    def source_of(self, gpu: str, rank: int) -> str:
        """The GPU whose channel a worker opens: its own, else a trainer rank's, in rotation."""
        if gpu in self.channels:
            return gpu
        sources = sorted(self.channels)
        return sources[rank % len(sources)]

    def open_page(self, source: str) -> "Page":
        """Raises ValueError if it is on another host."""
        try:
            return open_page(self.channels[source].page, self.world_size, self.timeout_s)
        except ValueError as error:
            reason = "transport 'ipc' connects the GPUs of one host"
            raise ValueError(f"the trainer rank on GPU {source}: {error} ({reason})") from error

    def to_wire(self) -> dict[str, Any]:
        return {**vars(self), "channels": encode_channels(self.channels)}


# Slots of a page. From TAKEN on there is one for each rank.
PUBLISHED, ABANDONED, ENDED, FAILED, TAKEN = range(5)
_ABSENT = -1  # its writer has not opened the page
_COUNTER_BYTES = 8
_POLL_S = 0.0001  # a poll takes the interpreter lock from the decoding thread


class Page:
    """A channel's counters in shared memory, each with one writer. PUBLISHED and TAKEN are round << 32
    | chunks: an aborted round's count is never mistaken for the next one's.

        ABANDONED   the last round that the trainer rank abandoned, or before it closed the channel
        ENDED       the last round that all remaining replicas received; on rank 0's page
        FAILED      the last round in which the trainer rank failed
    """

    def __init__(self, mapping: mmap.mmap, timeout_s: float) -> None:
        self._counters = memoryview(mapping).cast("q")
        self._timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self._counters)

    def __getitem__(self, slot: int) -> int:
        return self._counters[slot]

    def __setitem__(self, slot: int, value: int) -> None:
        self._counters[slot] = value

    def workers(self) -> list[int]:
        return [slot for slot in range(TAKEN, len(self)) if self[slot] != _ABSENT]

    def wait(self, reached: Callable[[], bool], peer: str) -> None:
        """Poll until `reached`, which may raise. Raises TransferFailed after the timeout."""
        deadline = time.monotonic() + self._timeout_s
        while not reached():
            if time.monotonic() > deadline:
                raise TransferFailed(f"{peer}: no progress in {self._timeout_s:g} s")
            time.sleep(_POLL_S)


def create_page(world_size: int, timeout_s: float) -> tuple[str, Page]:
    name, mapping = create_mapping(_COUNTER_BYTES * (TAKEN + world_size))
    page = Page(mapping, timeout_s)
    for slot in range(len(page)):
        page[slot] = _ABSENT
    page[PUBLISHED] = 0
    return name, page


def open_page(name: str, world_size: int, timeout_s: float) -> Page:
    size_bytes = _COUNTER_BYTES * (TAKEN + world_size)
    return Page(open_mapping(name, mmap.ACCESS_WRITE, size_bytes), timeout_s)


class SharedTensors:
    """The trainer's side without buffers: its tensors, shared once, and their digests."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._inspection = prepare_inspection(tensors, ())
        self._table = torch.empty(len(tensors), dtype=torch.int64, device=tensors[0].device)

    def describe(self) -> ResidentTensors:
        storages = {_address(tensor): tensor for tensor in self.tensors if tensor.numel()}
        indices = {address: index for index, address in enumerate(storages)}
        return ResidentTensors(
            storages=tuple(share_memory(tensor) for tensor in storages.values()),
            tensors=tuple(
                TensorLocation(indices[_address(tensor)], tensor.storage_offset() * tensor.itemsize)
                if tensor.numel()
                else TensorLocation(0, 0)
                for tensor in self.tensors
            ),
            digests=share_memory(self._table),
        )

    def refresh_digests(self) -> None:
        self._table.copy_(self._inspection().digests)


class OpenedTensors:
    """A worker's side: the trainer's tensors, mapped. Raises ValueError."""

    def __init__(self, described: ResidentTensors, device: torch.device) -> None:
        size = DIGEST_BYTES * len(described.tensors)
        if described.digests.size_bytes < size:
            raise ValueError(
                f"the digests of {len(described.tensors)} tensors need {size} bytes, "
                f"got {described.digests.size_bytes}"
            )
        self._locations = described.tensors
        self._storages = [open_memory(handle, device) for handle in described.storages]
        self._storage_bytes = [storage.numel() for storage in self._storages]
        self._table = open_memory(described.digests, device)[:size].view(torch.int64)
        self._read: dict[Chunk, tuple[int, list[torch.Tensor]]] = {}

    def received(self, chunks: Sequence[Chunk]) -> list[ReceivedChunk]:
        """The chunks in the trainer's memory. Raises ValueError unless they have the opened tensors."""
        firsts = list(accumulate((len(chunk.entries) for chunk in chunks), initial=0))
        if firsts[-1] != len(self._locations):
            raise ValueError(f"the chunks have {firsts[-1]} tensors, and {len(self._locations)} were opened")
        return [self._chunk(chunk, first) for chunk, first in zip(chunks, firsts, strict=False)]

    def _chunk(self, chunk: Chunk, first: int) -> ReceivedChunk:
        if chunk not in self._read:
            tensors = [self._tensor(entry, first + index) for index, entry in enumerate(chunk.entries)]
            self._read[chunk] = hash(tuple(tensor.data_ptr() for tensor in tensors)), tensors
        memory_key, tensors = self._read[chunk]
        return ReceivedChunk(
            chunk=chunk,
            memory_key=memory_key,
            sent=self._table[first : first + len(tensors)],
            read=lambda: tensors,
        )

    def _tensor(self, entry: Entry, index: int) -> torch.Tensor:
        check_location(self._locations[index], entry, self._storage_bytes)
        storage, offset = self._locations[index]
        flat = self._storages[storage][offset : offset + entry.size_bytes]
        return flat.view(entry.dtype).view(entry.shape)


class LocalChunk:
    """A chunk from another GPU, brought by copy engines before it is read. A kernel that reads over the link
    holds multiprocessors meanwhile (benchmarks/RESULTS.md, "A copy engine instead of NCCL")."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._memory = torch.empty(largest(chunks), dtype=torch.uint8, device=device)

    def block(self, remote: torch.Tensor) -> torch.Tensor:
        return self._memory[: remote.numel()].copy_(remote, non_blocking=True)

    def tensors(self, received: ReceivedChunk) -> ReceivedChunk:
        chunk, block = received.chunk, self._memory[: received.chunk.size_bytes]
        for entry, tensor in zip(chunk.entries, received.read(), strict=True):
            view(entry, block).copy_(tensor, non_blocking=True)
        assert received.sent is not None
        write_digests(chunk, received.sent, block)
        return packed_chunk(chunk, block)


def check_location(location: TensorLocation, entry: Entry, storage_bytes: Sequence[int]) -> None:
    storage, offset = location
    if not (0 <= storage < len(storage_bytes) and 0 <= offset <= storage_bytes[storage] - entry.size_bytes):
        raise ValueError(f"{entry.name!r} ({entry.size_bytes} bytes) is outside of the opened memory")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
