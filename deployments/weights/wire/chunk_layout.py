"""The layout of tensors in the chunks of a transport.

A chunk is one block of bytes: its tensors, each at a multiple of `ALIGNMENT`, then a table of their digests.
Both sides compute the layout from the same metadata and the sender's `chunk_bytes`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from math import prod
from typing import Any

import torch

from deployments.weights.wire.digest import prepare_digests
from deployments.weights.wire.digest_definition import DIGEST_BYTES, Copy

ALIGNMENT = 256
_CACHED_LAYOUTS = 64  # per round: one, or one per chunk

Names = Sequence[str]
Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the chunk

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Compared by identity: equal metadata gives the same object."""

    entries: tuple[Entry, ...]
    table_offset: int
    has_table: bool = True  # False on vLLM's own wire

    @property
    def size_bytes(self) -> int:
        return self.table_offset + (DIGEST_BYTES * len(self.entries) if self.has_table else 0)

    @cached_property
    def offered(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {entry.name: (entry.dtype, entry.shape) for entry in self.entries}


def plan_chunks(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], chunk_bytes: int) -> list[Chunk]:
    """Chunks of at most `chunk_bytes`, or of one larger tensor."""
    chunks: list[Chunk] = []
    entries: list[Entry] = []
    end = 0
    for name, dtype, shape in tensors:
        entry = Entry(name=name, dtype=dtype, shape=tuple(shape), offset=end)
        if entries and end + entry.size_bytes > chunk_bytes:
            chunks.append(Chunk(entries=tuple(entries), table_offset=end))
            entry = Entry(name=name, dtype=dtype, shape=tuple(shape), offset=0)
            entries = []
        entries.append(entry)
        end = -(-(entry.offset + entry.size_bytes) // ALIGNMENT) * ALIGNMENT
    if entries:
        chunks.append(Chunk(entries=tuple(entries), table_offset=end))
    return chunks


def largest(chunks: Sequence[Chunk]) -> int:
    return max((chunk.size_bytes for chunk in chunks), default=0)


def describe(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> dict[str, Any]:
    """Metadata in the wire form of vLLM's own engines: parallel lists of JSON types."""
    return {
        "names": [name for name, _, _ in tensors],
        "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in tensors],
        "shapes": [list(shape) for _, _, shape in tensors],
    }


@dataclass(kw_only=True)
class DescribedTensors:
    """The tensors of every round, described once per connection: there may be 20 thousand."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    chunk_bytes: int

    def chunks(self) -> tuple[Chunk, ...]:
        return layout(self.names, self.dtype_names, self.shapes, self.chunk_bytes)


Plan = Callable[[Names, Names, Shapes, Any], tuple[Chunk, ...]]


def cached_layout(size: int) -> Callable[[Plan], Plan]:
    def decorate(plan: Plan) -> Plan:
        cached = lru_cache(maxsize=size)(plan)

        @wraps(plan)
        def from_lists(
            names: Names, dtype_names: Names, shapes: Shapes, chunk_bytes: Any
        ) -> tuple[Chunk, ...]:
            try:
                return cached(tuple(names), tuple(dtype_names), tuple(map(tuple, shapes)), chunk_bytes)
            except TypeError as error:
                raise ValueError(
                    f"names, dtype_names and shapes must be lists of names and numbers: {error}"
                ) from error

        return from_lists

    return decorate


@cached_layout(_CACHED_LAYOUTS)
def layout(names: Names, dtype_names: Names, shapes: Shapes, chunk_bytes: int) -> tuple[Chunk, ...]:
    return tuple(plan_chunks(parse(names, dtype_names, shapes), chunk_bytes))


def parse(names: Names, dtype_names: Names, shapes: Shapes) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """The inverse of `describe`. Raises ValueError."""
    if not len(names) == len(dtype_names) == len(shapes):
        raise ValueError(
            "names, dtype_names and shapes must have one entry per tensor, "
            f"got {len(names)}, {len(dtype_names)} and {len(shapes)}"
        )
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        name = repeated[0]
        raise ValueError(f"each tensor must be named once, got {name!r} {names.count(name)} times")
    parsed = []
    for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
        dtype = getattr(torch, dtype_name, None) if isinstance(dtype_name, str) else None
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {name!r}: expected the name of a torch dtype, got {dtype_name!r}")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"tensor {name!r}: expected a shape of integers of at least 0, got {shape!r}")
        parsed.append((name, dtype, tuple(shape)))
    return parsed


def pack(chunk: Chunk, tensors: Iterator[tuple[str, torch.Tensor]], block: torch.Tensor) -> None:
    """Raises ValueError for undeclared tensors, and for one that was overwritten before it was packed."""
    copies, written = [], []
    for index, entry in enumerate(chunk.entries):
        name, tensor = next(tensors, (None, None))
        if tensor is None or name != entry.name or tuple(tensor.shape) != entry.shape:
            yielded = "nothing" if tensor is None else f"{name!r} {tuple(tensor.shape)}"
            raise ValueError(f"the source declared {entry.name!r} {entry.shape} and yielded {yielded}")
        source = tensor.detach().to(block.device, entry.dtype).contiguous()
        copies.append(Copy(index=index, source=source, target=view(entry, block)))
        written.append(_writes(source))
    for entry, copy, before in zip(chunk.entries, copies, written, strict=True):
        if _writes(copy.source) != before:  # its digest would be of the new values
            raise ValueError(f"the source has overwritten {entry.name!r} after it had yielded it")
    write_digests(chunk, prepare_digests([copy.source for copy in copies], copies)(), block)


def _writes(tensor: torch.Tensor) -> int:
    """torch's count; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def write_digests(chunk: Chunk, digests: torch.Tensor, block: torch.Tensor) -> None:
    block[chunk.table_offset : chunk.size_bytes].copy_(digests.view(torch.uint8))


def view(entry: Entry, block: torch.Tensor) -> torch.Tensor:
    flat = block[entry.offset : entry.offset + entry.size_bytes]
    return flat.view(entry.dtype).view(entry.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedChunk:
    """A chunk's tensors and the digests sent with them. Valid until the next one is requested."""

    chunk: Chunk
    memory_key: int  # same key and chunk: the same addresses
    sent: torch.Tensor | None  # int64 [n], on the device of the tensors; None: the sender states none
    read: Callable[[], list[torch.Tensor]]  # the chunk's n tensors, in its order, without a copy
    arrived_bytes: int | None = None  # fewer than the chunk's for a difference; None: all

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [(entry.name, tensor) for entry, tensor in zip(self.chunk.entries, self.read(), strict=True)]


def packed_chunk(chunk: Chunk, block: torch.Tensor) -> ReceivedChunk:
    return ReceivedChunk(
        chunk=chunk,
        memory_key=block.data_ptr(),
        sent=block[chunk.table_offset : chunk.size_bytes].clone().view(torch.int64),
        read=lambda: [view(entry, block) for entry in chunk.entries],
    )
