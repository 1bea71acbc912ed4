"""Transport `ipc` without buffers: the workers read the tensors where the trainer has them.

For a trainer whose tensors are its model's own memory. It shares them with the workers once; in a round it
only writes their digests into a table, and each worker copies what it needs, once (on another GPU: twice).
Other sources (sharded models, casts) are packed into buffers.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from deployments.weights.transports.ipc_channel import (
    ResidentTensors,
    TensorLocation,
    open_memory,
    share_memory,
)
from deployments.weights.wire.chunk_layout import (
    Chunk,
    Entry,
    ReceivedChunk,
    largest,
    packed_chunk,
    view,
    write_digests,
)
from deployments.weights.wire.digest import prepare_inspection
from deployments.weights.wire.digest_definition import DIGEST_BYTES


class SharedTensors:
    """The trainer's side: its n tensors and the table of their digests, shared with other processes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._inspection = prepare_inspection(tensors, ())
        self._table = torch.empty(len(tensors), dtype=torch.int64, device=tensors[0].device)

    def describe(self) -> ResidentTensors:
        """What another process needs to open them."""
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
        """Write the digests of the tensors' present content into the table; it is queued."""
        self._table.copy_(self._inspection().digests)


class OpenedTensors:
    """A worker's side: the trainer's tensors, mapped.

    Raises:
        ValueError: the driver refuses a handle, or the table of digests is too short.
    """

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
        self._read: dict[Chunk, tuple[int, list[torch.Tensor]]] = {}  # memory key and tensors

    def received(self, chunks: Sequence[Chunk]) -> list[ReceivedChunk]:
        """The chunks in the trainer's memory. Together they have the opened tensors, in the same order.

        Raises:
            ValueError: the chunks have other tensors than were opened.
        """
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
    """A worker's side, on another GPU than the trainer rank's: a chunk is copied here before it is read.

    A copy between two GPUs is a copy engine's. A kernel that reads over the link holds multiprocessors for as
    long as the link takes, and so does NCCL's (`benchmarks/RESULTS.md`, "A copy engine instead of NCCL").
    There is memory for one chunk: what reads the one before is queued on the same stream, ahead of the copy.
    """

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._memory = torch.empty(largest(chunks), dtype=torch.uint8, device=device)

    def block(self, remote: torch.Tensor) -> torch.Tensor:
        """A copy of a packed chunk (uint8, at most the largest chunk's size)."""
        return self._memory[: remote.numel()].copy_(remote, non_blocking=True)

    def tensors(self, received: ReceivedChunk) -> ReceivedChunk:
        """A copy of a chunk whose tensors and digests are where the trainer has them."""
        chunk, block = received.chunk, self._memory[: received.chunk.size_bytes]
        for entry, tensor in zip(chunk.entries, received.read(), strict=True):
            view(entry, block).copy_(tensor, non_blocking=True)
        assert received.sent is not None
        write_digests(chunk, received.sent, block)
        return packed_chunk(chunk, block)


def check_location(location: TensorLocation, entry: Entry, storage_bytes: Sequence[int]) -> None:
    """Check that a tensor is inside a storage.

    Args:
        storage_bytes: the sizes of the storages that were opened.

    Raises:
        ValueError: it is not.
    """
    storage, offset = location
    if not (0 <= storage < len(storage_bytes) and 0 <= offset <= storage_bytes[storage] - entry.size_bytes):
        raise ValueError(f"{entry.name!r} ({entry.size_bytes} bytes) is outside of the opened memory")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
