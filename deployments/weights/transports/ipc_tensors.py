"""Transport `ipc` without buffers: the workers read the tensors where the trainer holds them.

For a trainer whose tensors are its model's own memory. It opens them to the workers once; in a round it
only writes their digests into a table, and each worker copies what it needs, once. Others (sharded
models, casts) pack into buffers.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch

from deployments.weights.transports.ipc_channel import open_buffer, share_buffer
from deployments.weights.wire.chunk_layout import Chunk, Entry
from deployments.weights.wire.digest import prepare_inspection
from deployments.weights.wire.digest_definition import DIGEST_BYTES
from deployments.weights.wire.received_chunk import ReceivedChunk


class SharedTensors:
    """The trainer's side: its tensors and the table of their digests, open to other processes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._find = prepare_inspection(tensors, ())
        self._table = torch.empty(len(tensors), dtype=torch.int64, device=tensors[0].device)

    def describe(self) -> dict[str, Any]:
        """What another process needs to open them, as JSON types."""
        storages = {_address(tensor): tensor for tensor in self.tensors if tensor.numel()}
        numbers = {address: number for number, address in enumerate(storages)}
        places = [
            [numbers[_address(tensor)], tensor.storage_offset() * tensor.itemsize]
            if tensor.numel()
            else [0, 0]
            for tensor in self.tensors
        ]
        shared = [share_buffer(tensor) for tensor in storages.values()]
        return {"storages": shared, "tensors": places, "digests": share_buffer(self._table)}

    def look(self) -> None:
        """Write the digests of what the tensors hold now into the table; it is queued."""
        self._table.copy_(self._find().digests)


class OpenedTensors:
    """A worker's side.

    Raises:
        ValueError: this is no such description, or the driver refuses a handle.
    """

    def __init__(self, described: Mapping[str, Any], device: torch.device) -> None:
        try:
            self._places = [(int(storage), int(offset)) for storage, offset in described["tensors"]]
            storages, digests = list(described["storages"]), described["digests"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the description of shared tensors: {error!r}") from error
        self._storages = [open_buffer(handle, device) for handle in storages]
        self._table = open_buffer(digests, device)[: DIGEST_BYTES * len(self._places)].view(torch.int64)
        self._read: dict[Chunk, tuple[int, list[torch.Tensor]]] = {}

    def arrivals(self, chunks: Sequence[Chunk]) -> list[ReceivedChunk]:
        """The chunks as they lie in the trainer's memory, whose tensors come in the same order.

        Raises:
            ValueError: more or other tensors than were opened.
        """
        firsts = list(accumulate((len(chunk.entries) for chunk in chunks), initial=0))
        if firsts[-1] != len(self._places):
            raise ValueError(f"{firsts[-1]} tensors are announced and {len(self._places)} were opened")
        return [self._arrival(chunk, first) for chunk, first in zip(chunks, firsts, strict=False)]

    def _arrival(self, chunk: Chunk, first: int) -> ReceivedChunk:
        if chunk not in self._read:
            tensors = [self._tensor(entry, first + number) for number, entry in enumerate(chunk.entries)]
            self._read[chunk] = hash(tuple(tensor.data_ptr() for tensor in tensors)), tensors
        place, tensors = self._read[chunk]
        return ReceivedChunk(
            chunk=chunk,
            place=place,
            sent=self._table[first : first + len(tensors)],
            read=lambda: tensors,
        )

    def _tensor(self, entry: Entry, number: int) -> torch.Tensor:
        storage, offset = self._places[number]
        size = prod(entry.shape) * entry.dtype.itemsize
        if not (0 <= storage < len(self._storages) and 0 <= offset <= self._storages[storage].numel() - size):
            raise ValueError(f"{entry.name!r} ({size} bytes) lies outside of what was opened")
        flat = self._storages[storage][offset : offset + size]
        return flat.view(entry.dtype).view(entry.shape)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
