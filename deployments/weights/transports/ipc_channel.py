"""The channel of transport `ipc`, between a trainer rank and workers on the same host.

A channel is GPU memory that the trainer rank shares (two buffers, or the model's own tensors) and a page of
counters in shared memory. `Channel` describes it to the workers in JSON types, once per connection.
"""

import base64
import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, JsonValue, TypeAdapter, ValidationError
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from deployments.host.shared_memory import create_mapping, open_mapping
from deployments.protocol.errors import TransferFailed
from deployments.weights.transports.registry import DEFAULT_TIMEOUT_S
from deployments.weights.wire.chunk_layout import DescribedTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHandle:
    """A CUDA storage that another process can open: what torch's `_share_cuda_` returns, bytes in base64."""

    memory: str
    size_bytes: int
    offset_bytes: int
    counter: str  # in shared memory: torch counts there who uses the storage
    counter_offset: int
    event: str
    sync: bool


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a CUDA device, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def share_memory(tensor: torch.Tensor) -> MemoryHandle:
    """The handle of a CUDA tensor's storage, which must outlive its users."""
    # The first part is this process's index of the device.
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
    """The storage of another process (uint8 [handle.size_bytes]).

    Raises:
        ValueError: the handle is not one of `share_memory`, or the driver refuses it.
    """
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
    """Where a tensor is in the storages of `ResidentTensors`."""

    storage: int  # index
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBuffers:
    """Buffers into which the trainer rank packs chunks, in turn."""

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
    """What a worker needs to open a channel."""

    page: str  # name of the segment
    memory: Annotated[PackedBuffers | ResidentTensors, Field(discriminator="kind")]


_CHANNELS: TypeAdapter[dict[str, Channel]] = TypeAdapter(dict[str, Channel])


def encode_channels(channels: Mapping[str, Channel]) -> JsonValue:
    """Channels by GPU UUID, in JSON types."""
    encoded: JsonValue = _CHANNELS.dump_python(dict(channels), mode="json")
    return encoded


def parse_channels(encoded: object) -> dict[str, Channel]:
    """The inverse of `encode_channels`; channels that are parsed already are returned unchanged.

    Raises:
        ValueError: something else; names the first wrong field.
    """
    try:
        return _CHANNELS.validate_python(encoded)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(["channels", *map(str, first["loc"])])
        raise ValueError(f"{path}: {first['msg']}, got {str(first['input'])[:200]}") from None


@dataclass(kw_only=True)
class IpcInitInfo(DescribedTensors, WeightTransferInitInfo):
    """The channels of all trainer ranks, and the tensors of every round.

    Attributes:
        channels: by GPU UUID.
        rank_offset: of a replica's first worker.
        world_size: counts the publisher (rank 0) and every worker of every replica.
        timeout_s: of every wait for the publisher.

    Raises:
        ValueError: the channels are not of this form, which names the first wrong field, or there is none.
    """

    channels: Mapping[str, Channel]
    rank_offset: int
    world_size: int
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        self.channels = parse_channels(self.channels)
        if not self.channels:
            raise ValueError("channels: expected that of one trainer rank at least, got none")

    def source_of(self, gpu: str, rank: int) -> str:
        """The GPU whose channel a worker opens: its own one, else that of any trainer rank, in turn.

        Args:
            gpu: the worker's, by its UUID.
            rank: of the worker, among those of all replicas.
        """
        if gpu in self.channels:
            return gpu
        sources = sorted(self.channels)
        return sources[rank % len(sources)]

    def open_page(self, source: str) -> "Page":
        """Map the counters of a channel, by its GPU.

        Raises:
            ValueError: it is on another host, or of another world size.
        """
        try:
            return open_page(self.channels[source].page, self.world_size, self.timeout_s)
        except ValueError as error:
            reason = "transport 'ipc' connects the GPUs of one host"
            raise ValueError(f"the trainer rank on GPU {source}: {error} ({reason})") from error

    def to_wire(self) -> dict[str, Any]:
        """The init info in JSON types."""
        return {**vars(self), "channels": encode_channels(self.channels)}


# Slots of a page. From TAKEN on there is one for each rank; that of rank 0 is not used.
PUBLISHED, ABANDONED, ENDED, FAILED, TAKEN = range(5)
_ABSENT = -1  # until its writer has opened the page
_COUNTER_BYTES = 8
_POLL_S = 0.0001  # each poll takes the interpreter's lock, for which the decoding thread waits


class Page:
    """The counters of a channel, in shared memory that the trainer rank and its workers map.

    Each counter has one writer. PUBLISHED and TAKEN are `round << 32 | chunks`, so that what an aborted round
    left is never mistaken for the next round's. The other trainer ranks read ENDED and FAILED (`ipc_ranks`).

        ABANDONED   the last round that the trainer rank abandoned, or after which it closed the channel
        ENDED       the last round in which all replicas that remained received everything; rank 0's page
        FAILED      the last round in which the trainer rank failed

    Args:
        timeout_s: of every wait.
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
        """The slots of the workers that have opened the channel."""
        return [slot for slot in range(TAKEN, len(self)) if self[slot] != _ABSENT]

    def wait(self, reached: Callable[[], bool], peer: str) -> None:
        """Poll until `reached`, which may raise to end the wait.

        Raises:
            TransferFailed: it was not reached within the timeout; names the peer.
        """
        deadline = time.monotonic() + self._timeout_s
        while not reached():
            if time.monotonic() > deadline:
                raise TransferFailed(f"{peer}: no progress in {self._timeout_s:g} s")
            time.sleep(_POLL_S)


def create_page(world_size: int, timeout_s: float) -> tuple[str, Page]:
    """The name and the counters of a new page, whose segment the caller removes.

    Raises:
        OSError: not enough shared memory.
    """
    name, mapping = create_mapping(_page_bytes(world_size))
    page = Page(mapping, timeout_s)
    for slot in range(len(page)):
        page[slot] = _ABSENT
    page[PUBLISHED] = 0
    return name, page


def open_page(name: str, world_size: int, timeout_s: float) -> Page:
    """Map the counters of a channel.

    Raises:
        ValueError: no such page on this host, a page of another world size, or not a name of ours.
    """
    return Page(open_mapping(name, mmap.ACCESS_WRITE, _page_bytes(world_size)), timeout_s)


def _page_bytes(world_size: int) -> int:
    return _COUNTER_BYTES * (TAKEN + world_size)
