"""How tensors lie in the chunks that a transport moves: a plan that both sides make alike.

A chunk is one block of bytes: its tensors, each at a multiple of `ALIGNMENT`, then a table with one
digest a tensor. Sender and receiver derive the plan from the same metadata and the same
`chunk_bytes`, which the sender ships, so the two cannot disagree.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch

from deployments.weights.wire.digest import survey
from deployments.weights.wire.digest_definition import DIGEST_BYTES, Copy

ALIGNMENT = 256
_LAYOUTS = 64  # that are remembered: a round has one, or one a chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor in a chunk."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the chunk

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Compared by identity: the layout of a payload that comes again is the same object again."""

    entries: tuple[Entry, ...]
    table_offset: int

    @property
    def size_bytes(self) -> int:
        return self.table_offset + DIGEST_BYTES * len(self.entries)

    @cached_property
    def offered(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape by name."""
        return {entry.name: (entry.dtype, entry.shape) for entry in self.entries}


def plan_chunks(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], chunk_bytes: int) -> list[Chunk]:
    """Lay (name, dtype, shape) out in chunks of about `chunk_bytes`; one larger tensor is a chunk alone."""
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
        end = _aligned(entry.offset + entry.size_bytes)
    if entries:
        chunks.append(Chunk(entries=tuple(entries), table_offset=end))
    return chunks


def describe(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> dict[str, Any]:
    """The wire form that vLLM's own engines use for metadata: parallel lists, JSON types."""
    return {
        "names": [name for name, _, _ in tensors],
        "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in tensors],
        "shapes": [list(shape) for _, _, shape in tensors],
    }


@dataclass(kw_only=True)
class Described:
    """What `describe` says, for a connection whose rounds all bring the same tensors in this order: it is
    said once, and not in every round (a mixture of experts has 20 thousand)."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    chunk_bytes: int

    def chunks(self) -> tuple[Chunk, ...]:
        """Raises ValueError: as `parse`."""
        return layout(self.names, self.dtype_names, self.shapes, self.chunk_bytes)


def layout(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], chunk_bytes: int
) -> tuple[Chunk, ...]:
    """The chunks of a payload that `describe` describes; the same objects for the same payload.

    Raises:
        ValueError: as `parse`.
    """
    try:
        return _layout(tuple(names), tuple(dtype_names), tuple(map(tuple, shapes)), chunk_bytes)
    except TypeError as error:
        raise ValueError(
            f"names, dtype_names and shapes must be lists of names and numbers: {error}"
        ) from error


@lru_cache(maxsize=_LAYOUTS)
def _layout(
    names: tuple[str, ...],
    dtype_names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    chunk_bytes: int,
) -> tuple[Chunk, ...]:
    return tuple(plan_chunks(parse(names, dtype_names, shapes), chunk_bytes))


def parse(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """The inverse of `describe`.

    Raises:
        ValueError: the lists differ in length, a name comes twice, a dtype is unknown, a shape is not of
            whole numbers.
    """
    if not len(names) == len(dtype_names) == len(shapes):
        raise ValueError(
            "names, dtype_names and shapes must have one entry a tensor, "
            f"got {len(names)}, {len(dtype_names)} and {len(shapes)}"
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"each tensor must be named once, got {twice[0]!r} {names.count(twice[0])} times")
    return [
        (name, _dtype(name, dtype_name), _shape(name, shape))
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True)
    ]


def pack(chunk: Chunk, tensors: Iterator[tuple[str, torch.Tensor]], block: torch.Tensor) -> None:
    """Write the chunk's tensors, taken from the front of `tensors`, and their digests into `block`.

    Args:
        block: uint8 [chunk.size_bytes] on the device that sends; on a GPU nothing here waits for it.

    Raises:
        ValueError: the source yields another tensor than its metadata declared.
    """
    copies = []
    for place, entry in enumerate(chunk.entries):
        name, tensor = next(tensors, (None, None))
        if tensor is None or name != entry.name or tuple(tensor.shape) != entry.shape:
            came = "nothing" if tensor is None else f"{name!r} {tuple(tensor.shape)}"
            raise ValueError(f"the source declared {entry.name!r} {entry.shape} and yielded {came}")
        source = tensor.detach().to(block.device, entry.dtype).contiguous()
        copies.append(Copy(place=place, source=source, target=view(entry, block)))
    put_digests(chunk, survey([copy.source for copy in copies], copies)().digests, block)


def put_digests(chunk: Chunk, digests: torch.Tensor, block: torch.Tensor) -> None:
    """Write the digests (int64 [n]) behind the chunk's tensors."""
    block[chunk.table_offset : chunk.size_bytes].copy_(digests.view(torch.uint8))


def sent_digests(chunk: Chunk, block: torch.Tensor) -> torch.Tensor:
    """A copy of the digests that came along (int64 [n], on the block's device; see `digest.unsigned`)."""
    return block[chunk.table_offset : chunk.size_bytes].clone().view(torch.int64)


def view(entry: Entry, block: torch.Tensor) -> torch.Tensor:
    """The entry's bytes in `block` as a tensor of its dtype and shape; no copy."""
    flat = block[entry.offset : entry.offset + entry.size_bytes]
    return flat.view(entry.dtype).view(entry.shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _dtype(name: str, dtype_name: str) -> torch.dtype:
    dtype = getattr(torch, dtype_name, None) if isinstance(dtype_name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor {name!r}: expected the name of a torch dtype, got {dtype_name!r}")
    return dtype


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"tensor {name!r}: expected a shape of whole numbers, got {shape!r}")
    return tuple(shape)
