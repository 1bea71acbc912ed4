"""The difference of two states of a block on a CUDA device: its changed 16-bit words, in rows of 128.

    counts     uint8 [rows]    how many of a row's words have changed
    values     uint16 [n]      what they are now, row after row
    columns    uint8 [n]       their places in their rows
    rest       uint8 [m]       the block behind its last full row

The first three are padded to multiples of 16 bytes. The host waits for the device once, for n.
"""

import torch
from vllm.triton_utils import tl, triton

ROW_WORDS = 128  # a count fits into a byte
_ROW_BYTES = 2 * ROW_WORDS
_TILE_ROWS = 32
_ALIGNMENT = 16  # Triton compiles a kernel again for other pointers


def encode_delta(block: torch.Tensor, base: torch.Tensor) -> torch.Tensor | None:
    """Returns what turns `base` (uint8 [n], n even) into `block`, and overwrites `base` with `block`.
    None: it is more than half of the block."""
    rows, rest = divmod(block.numel(), _ROW_BYTES)
    counts = torch.zeros(_aligned(rows), dtype=torch.uint8, device=block.device)
    words = block.view(torch.int16), base.view(torch.int16)
    grid = (-(-rows // _TILE_ROWS),)
    with torch.cuda.device_of(block):
        if rows:
            _count[grid](*words, counts, rows, TILE=_TILE_ROWS, ROW=ROW_WORDS)
        ends = counts.cumsum(0)
        changed = _aligned(int(ends[-1])) if rows else 0
        size = len(counts) + 3 * changed + rest
        if size > block.numel() // 2:
            base.copy_(block)
            return None
        delta = torch.empty(size, dtype=torch.uint8, device=block.device)
        delta[: len(counts)] = counts
        delta[size - rest :] = base[rows * _ROW_BYTES :] = block[rows * _ROW_BYTES :]
        _collect[grid](
            *words, counts, ends, *_parts(delta, len(counts), rest), rows, TILE=_TILE_ROWS, ROW=ROW_WORDS
        )
    return delta


def apply_delta(delta: torch.Tensor, block: torch.Tensor) -> None:
    """Make a block of its base, in place. A damaged delta makes another one, and touches no other memory.
    Raises ValueError if its size is no delta's of this block."""
    rows, rest = divmod(block.numel(), _ROW_BYTES)
    counts = delta[: _aligned(rows)]
    pairs = len(delta) - _aligned(rows) - rest
    if not rows or pairs < 0 or pairs % (3 * _ALIGNMENT):
        raise ValueError(f"expected a delta of a block of {block.numel()} bytes, got one of another")
    values, columns = _parts(delta, len(counts), rest)
    block[rows * _ROW_BYTES :] = delta[len(delta) - rest :]
    with torch.cuda.device_of(block):
        _place[(-(-rows // _TILE_ROWS),)](
            block.view(torch.int16),
            counts,
            counts.cumsum(0),
            values,
            columns,
            rows,
            len(columns),
            TILE=_TILE_ROWS,
            ROW=ROW_WORDS,
        )


def warm_up(device: torch.device) -> None:
    """Compile the kernels, which takes a second."""
    base = torch.zeros(2 * _ROW_BYTES, dtype=torch.uint8, device=device)
    block = base.clone()
    block[0] = 1
    delta = encode_delta(block, base)
    assert delta is not None
    apply_delta(delta, block)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _parts(delta: torch.Tensor, rows: int, rest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Its values (int16) and columns."""
    count = (len(delta) - rows - rest) // 3
    end = rows + 2 * count
    return delta[rows:end].view(torch.int16), delta[end : end + count]


# Masks are of whole rows: others would make the loads narrow.
@triton.jit(do_not_specialize=["rows"])
def _count(  # type: ignore[no-untyped-def]
    words,  # int16 [rows, ROW]
    former,  # int16 [rows, ROW]
    counts,  # uint8 [rows]
    rows,
    TILE: tl.constexpr,
    ROW: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
    inside = (row < rows)[:, None]
    changed = tl.load(words + at, mask=inside, other=0) != tl.load(former + at, mask=inside, other=0)
    tl.store(counts + row, tl.sum(changed.to(tl.int32), axis=1).to(tl.uint8), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _collect(  # type: ignore[no-untyped-def]
    words,  # int16 [rows, ROW]
    former,  # int16 [rows, ROW]; becomes `words`
    counts,  # uint8 [rows]
    ends,  # int64 [rows]: sums of the counts
    values,  # int16 [n]
    columns,  # uint8 [n]
    rows,
    TILE: tl.constexpr,
    ROW: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    lanes = tl.arange(0, ROW)[None, :] + tl.zeros([TILE, ROW], dtype=tl.int32)
    at = row[:, None] * ROW + lanes
    inside = (row < rows)[:, None]
    word = tl.load(words + at, mask=inside, other=0)
    changed = word != tl.load(former + at, mask=inside, other=0)
    count = tl.load(counts + row, mask=row < rows, other=0).to(tl.int64)
    first = tl.load(ends + row, mask=row < rows, other=0) - count
    place = first[:, None] + tl.cumsum(changed.to(tl.int32), axis=1) - 1
    tl.store(values + place, word, mask=changed)
    tl.store(columns + place, lanes.to(tl.uint8), mask=changed)
    tl.store(former + at, word, mask=changed)


@triton.jit(do_not_specialize=["rows", "total"])
def _place(  # type: ignore[no-untyped-def]
    words,  # int16 [rows, ROW]
    counts,  # uint8 [rows]
    ends,  # int64 [rows]: sums of the counts
    values,  # int16 [total]
    columns,  # uint8 [total]
    rows,
    total,
    TILE: tl.constexpr,
    ROW: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    lanes = tl.arange(0, ROW)[None, :]
    count = tl.load(counts + row, mask=row < rows, other=0).to(tl.int64)
    place = (tl.load(ends + row, mask=row < rows, other=0) - count)[:, None] + lanes
    given = (lanes < count[:, None]) & (place < total)
    column = tl.load(columns + place, mask=given, other=0).to(tl.int64) % ROW
    value = tl.load(values + place, mask=given, other=0)
    tl.store(words + row[:, None] * ROW + column, value, mask=given)
