"""How vLLM's trainer engines pack tensors: one directly behind the other, without padding and digests.

Sender and receiver cut the same pieces from the same metadata (vLLM 0.32, `packed_tensor.py`):

    nccl, packed    tensors are added until they have more bytes than the buffer size, the last one included
    ipc, packed     each call names the tensors of its piece
    not packed      each tensor by itself
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count

import torch

from deployments.weights.wire.chunk_layout import Chunk, Entry, ReceivedChunk, parse, plan_chunks
from deployments.weights.wire.digest_definition import WORD_BYTES

_CACHED_LAYOUTS = 1024  # a round over IPC has one for each piece
_moving = count(-1, -1)  # keys of memory that is another one each time

Metadata = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]


def nccl_pieces(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], buffer_bytes: int
) -> tuple[Chunk, ...]:
    """The pieces of packed NCCL; the same objects for the same metadata.

    Raises:
        ValueError: the metadata is not what vLLM sends.
    """
    return _cached(partial(_nccl_pieces, buffer_bytes=buffer_bytes), names, dtype_names, shapes)


def one_piece(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[Chunk, ...]:
    """All tensors in one piece. As `nccl_pieces`."""
    return _cached(_one_piece, names, dtype_names, shapes)


def separate_tensors(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], chunk_bytes: int
) -> tuple[Chunk, ...]:
    """Tensors that come by themselves, gathered into aligned chunks of our own. As `nccl_pieces`."""
    return _cached(partial(_separate, chunk_bytes=chunk_bytes), names, dtype_names, shapes)


def _cached(
    cut: Callable[..., tuple[Chunk, ...]],
    names: Sequence[str],
    dtype_names: Sequence[str],
    shapes: Sequence[Sequence[int]],
) -> tuple[Chunk, ...]:
    try:
        return cut(tuple(names), tuple(dtype_names), tuple(map(tuple, shapes)))
    except TypeError as error:
        raise ValueError(
            f"names, dtype_names and shapes must be lists of names and numbers: {error}"
        ) from error


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _nccl_pieces(
    names: tuple[str, ...],
    dtype_names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    buffer_bytes: int,
) -> tuple[Chunk, ...]:
    pieces: list[Chunk] = []
    entries: list[Entry] = []
    end = 0
    for name, dtype, shape in parse(names, dtype_names, shapes):
        entries.append(Entry(name=name, dtype=dtype, shape=shape, offset=end))
        end += entries[-1].size_bytes
        if end > buffer_bytes:
            pieces.append(_piece(entries, end))
            entries, end = [], 0
    if entries:
        pieces.append(_piece(entries, end))
    return tuple(pieces)


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _one_piece(
    names: tuple[str, ...], dtype_names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
) -> tuple[Chunk, ...]:
    entries: list[Entry] = []
    end = 0
    for name, dtype, shape in parse(names, dtype_names, shapes):
        entries.append(Entry(name=name, dtype=dtype, shape=shape, offset=end))
        end += entries[-1].size_bytes
    return (_piece(entries, end),) if entries else ()


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _separate(
    names: tuple[str, ...],
    dtype_names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    chunk_bytes: int,
) -> tuple[Chunk, ...]:
    chunks = plan_chunks(parse(names, dtype_names, shapes), chunk_bytes)
    return tuple(_piece(chunk.entries, chunk.table_offset) for chunk in chunks)


def _piece(entries: Sequence[Entry], size_bytes: int) -> Chunk:
    return Chunk(entries=tuple(entries), table_offset=size_bytes, has_table=False)


@lru_cache(maxsize=_CACHED_LAYOUTS)
def is_aligned(piece: Chunk) -> bool:
    """Whether each tensor can be read where it is: begins at a multiple of its element's and a word's size.

    vLLM's packing does not care: an odd number of bfloat16 elements moves what follows by half a float32.
    """
    return all(entry.offset % _unit(entry) == 0 for entry in piece.entries)


def _unit(entry: Entry) -> int:
    return max(entry.dtype.itemsize, WORD_BYTES)  # digests are of words


def received_block(piece: Chunk, block: torch.Tensor) -> ReceivedChunk:
    """A piece in one block (uint8 [piece.size_bytes], its address a multiple of eight)."""
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
    """A piece whose tensors are in memory of their own, in its order."""
    return ReceivedChunk(chunk=piece, memory_key=next(_moving), sent=None, read=lambda: tensors)
