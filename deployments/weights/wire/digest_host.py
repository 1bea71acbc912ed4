"""The digest of bytes in host memory. Without torch: a process that only reads files starts quickly.

`digest_definition` defines a digest.
"""

import numpy as np
import numpy.typing as npt

from deployments.weights.wire.digest_definition import (
    ROW_WORDS,
    WORD_BYTES,
    Table,
    Words,
    multipliers,
    row_multipliers,
)

Bytes = npt.NDArray[np.uint8]


def digest_bytes(data: Bytes) -> int:
    """The digest of a tensor's bytes (uint8 [n]): unsigned, 64 bits. Releases the interpreter lock."""
    end = data.size // WORD_BYTES * WORD_BYTES  # of the last full word
    # torch's int64 multiply is eight times slower than numpy's fused product and sum (0.6 and
    # 4.9 GB/s on one core of an EPYC 9004).
    words = data[:end].view(np.int32)
    if end < data.size:
        last = np.zeros(WORD_BYTES, dtype=np.uint8)
        last[: data.size - end] = data[end:]
        words = np.concatenate([words, last.view(np.int32)])
    rows = _row_sums(words)
    with np.errstate(over="ignore"):
        return (int(np.einsum("i,i->", rows, row_multipliers(len(rows)))) ^ data.size) % (1 << 64)


def _row_sums(words: Words) -> Table:
    table = multipliers(ROW_WORDS, 1)
    full = len(words) // ROW_WORDS
    sums = np.zeros(full + (len(words) > full * ROW_WORDS), dtype=np.int64)
    if full:
        body = words[: full * ROW_WORDS].reshape(full, ROW_WORDS)
        sums[:full] = np.einsum("ij,j->i", body, table, dtype=np.int64, casting="unsafe")
    if len(sums) > full:
        tail = words[full * ROW_WORDS :]
        sums[full] = np.einsum("j,j->", tail, table[: len(tail)], dtype=np.int64, casting="unsafe")
    return sums
