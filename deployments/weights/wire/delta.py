"""The difference of two states of a block: its changed 16-bit words.

A step of reinforcement learning in bfloat16 changes few. A block is encoded in pieces that fit a core's
cache, a piece in rows of 256 words, of which n have changed:

    counts     uint16 [rows]    how many of a row's words have changed
    values     uint16 [n]       what they are now
    columns    uint8 [n]        their places in their rows, and a byte more if n is odd
"""

import numpy as np
import numpy.typing as npt

from deployments.weights.wire.digest_definition import Bytes

ROW_WORDS = 256
PIECE_WORDS = 1 << 18
Words = npt.NDArray[np.uint16]


def encode_delta(block: Bytes, base: Bytes) -> Bytes | None:
    """Returns what turns `base` (uint8 [n], n a multiple of 8) into `block`, and overwrites `base` with
    `block`. None: it is more than half of the block."""
    words, former = block.view(np.uint16), base.view(np.uint16)
    pieces, size = [], 0
    for start in range(0, len(words), PIECE_WORDS):
        piece = _encode(words[start : start + PIECE_WORDS], former[start : start + PIECE_WORDS])
        pieces.append(piece)
        size += piece.nbytes
        if size > block.size // 2:
            np.copyto(base, block)
            return None
    return np.concatenate(pieces).view(np.uint8) if pieces else np.empty(0, dtype=np.uint8)


def apply_delta(delta: Bytes, block: Bytes) -> None:
    """Make a block of its base, in place. Raises ValueError if the delta is for another block size."""
    words = block.view(np.uint16)
    rest = delta[: delta.size // 2 * 2].view(np.uint16)
    try:
        for start in range(0, len(words), PIECE_WORDS):
            rest = _apply(rest, words[start : start + PIECE_WORDS])
        if len(rest) or delta.size % 2:
            raise _Other
    except _Other:
        raise ValueError(f"expected a delta of a block of {block.size} bytes, got one of another") from None


class _Other(Exception):
    """It is the delta of another block."""


def _encode(words: Words, former: Words) -> Words:
    wide, former_wide = words.view(np.uint64), former.view(np.uint64)
    found = np.flatnonzero(wide != former_wide)
    inside = np.flatnonzero((wide[found] ^ former_wide[found]).view(np.uint16) != 0)
    changed = (found[inside >> 2] << 2) + (inside & 3)  # a third less time than searching words
    rows = _rows(words)
    end = rows + len(changed)
    piece = np.zeros(end + -(-len(changed) // 2), dtype=np.uint16)
    piece[:rows] = np.bincount(changed >> 8, minlength=rows)  # a division takes as long as the search
    piece[rows:end] = former[changed] = words[changed]
    piece[end:].view(np.uint8)[: len(changed)] = changed.astype(np.uint8)
    return piece


def _apply(delta: Words, words: Words) -> Words:
    """Returns the rest of the delta."""
    rows = _rows(words)
    counts = delta[:rows]
    count = int(counts.sum(dtype=np.int64))
    end = rows + count
    rest = delta[end + -(-count // 2) :]
    values, columns = delta[rows:end], delta[end:].view(np.uint8)[:count]
    if len(counts) < rows or len(columns) < count:
        raise _Other
    changed = np.repeat(np.arange(rows, dtype=np.int64) * ROW_WORDS, counts)
    changed += columns
    if count and int(changed.max()) >= len(words):
        raise _Other
    words[changed] = values
    return rest


def _rows(words: Words) -> int:
    return -(-len(words) // ROW_WORDS)
