"""How vLLM's trainer engines pack tensors: end to end, without padding or digests. Both sides cut the same
pieces from the same metadata (vLLM 0.32, `packed_tensor.py`):

    nccl, packed    tensors are added until they exceed the buffer size, the last one included
    ipc, packed     each call names the tensors of its piece
    not packed      each tensor by itself
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from math import inf

import torch

from deployments.weights.wire.chunk_layout import (
    Chunk,
    Entry,
    Names,
    ReceivedChunk,
    Shapes,
    cached_layout,
    parse,
    plan_chunks,
)
from deployments.weights.wire.digest_definition import WORD_BYTES

_CACHED_LAYOUTS = 1024  # a round over IPC has one per piece
_moving = count(-1, -1)  # keys for memory whose address changes


@cached_layout(_CACHED_LAYOUTS)
def nccl_pieces(names: Names, dtype_names: Names, shapes: Shapes, chunk_bytes: float) -> tuple[Chunk, ...]:
    """The pieces of packed NCCL. Raises ValueError if the metadata is not what vLLM sends."""
    pieces: list[Chunk] = []
    entries: list[Entry] = []
    end = 0
    for name, dtype, shape in parse(names, dtype_names, shapes):
        entries.append(Entry(name=name, dtype=dtype, shape=shape, offset=end))
        end += entries[-1].size_bytes
        if end > chunk_bytes:
            pieces.append(_piece(entries, end))
            entries, end = [], 0
    if entries:
        pieces.append(_piece(entries, end))
    return tuple(pieces)


def one_piece(names: Names, dtype_names: Names, shapes: Shapes) -> tuple[Chunk, ...]:
    return nccl_pieces(names, dtype_names, shapes, inf)


@cached_layout(_CACHED_LAYOUTS)
def separate_tensors(names: Names, dtype_names: Names, shapes: Shapes, chunk_bytes: int) -> tuple[Chunk, ...]:
    chunks = plan_chunks(parse(names, dtype_names, shapes), chunk_bytes)
    return tuple(_piece(chunk.entries, chunk.table_offset) for chunk in chunks)


def _piece(entries: Sequence[Entry], size_bytes: int) -> Chunk:
    return Chunk(entries=tuple(entries), table_offset=size_bytes, has_table=False)


@lru_cache(maxsize=_CACHED_LAYOUTS)
def is_aligned(piece: Chunk) -> bool:
    """vLLM does not align: an odd number of bfloat16 elements moves what follows by half a float32."""
    return all(entry.offset % _unit(entry) == 0 for entry in piece.entries)


def _unit(entry: Entry) -> int:
    return max(entry.dtype.itemsize, WORD_BYTES)  # digests are computed from words


def received_block(piece: Chunk, block: torch.Tensor) -> ReceivedChunk:
    """A piece in one block (uint8 [piece.size_bytes]) at a multiple of eight."""
    return ReceivedChunk(
        chunk=piece,
        memory_key=block.data_ptr() if is_aligned(piece) else next(_moving),
        sent=None,
        read=lambda: [_tensor(entry, block) for entry in piece.entries],
    )


def _tensor(entry: Entry, block: torch.Tensor) -> torch.Tensor:
    flat = block[entry.offset : entry.offset + entry.size_bytes]
    if flat.storage_offset() % _unit(entry):
        flat = flat.clone()
    return flat.view(entry.dtype).view(entry.shape)


def received_tensors(piece: Chunk, tensors: list[torch.Tensor]) -> ReceivedChunk:
    return ReceivedChunk(chunk=piece, memory_key=next(_moving), sent=None, read=lambda: tensors)
