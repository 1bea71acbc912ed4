"""The 64-bit multilinear hash that every device computes alike, and its multipliers.

Lemire and Kaser, "Strongly universal string hashing is fast", 2014: 32-bit words are multiplied by random odd
64-bit numbers and summed modulo 2**64. Two levels keep the multipliers in cache: words to rows of
`ROW_WORDS`, then rows to one number. It detects transport faults; it is no signature. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

ROW_WORDS = 16384
DIGEST_BYTES = 8
WORD_BYTES = 4

Table = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Of n tensors, on their device: int64 [n] each."""

    sums: torch.Tensor
    sizes: torch.Tensor  # bytes
    nonfinite: torch.Tensor  # not zero where a tensor holds NaN or infinity

    @property
    def digests(self) -> torch.Tensor:
        return self.sums ^ self.sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    index: int
    source: torch.Tensor
    target: torch.Tensor


@cache
def multipliers(count: int, stream: int) -> Table:
    """Fixed odd 64-bit numbers [count]; the wire format depends on them."""
    numbers = np.random.Generator(np.random.PCG64(stream)).integers(
        np.iinfo(np.int64).min, np.iinfo(np.int64).max, size=count, dtype=np.int64
    )
    return numbers | 1


def row_multipliers(rows: int) -> Table:
    """Multipliers of the second level [rows]; powers of two make few tables."""
    return multipliers(1 << max(rows - 1, 1).bit_length(), 2)[:rows]


def unsigned(digests: torch.Tensor) -> list[int]:
    return [value % (1 << 64) for value in digests.tolist()]


def version_digest(names: Sequence[str], digests: Sequence[int] | Digests) -> str:
    """The digest of a version (32 hexadecimal digits), from n names and unsigned digests in any order."""
    order, text = _sorted_names(tuple(names))
    hasher = blake2b(text, digest_size=16)
    hasher.update(np.asarray(digests, dtype="<u8")[order].tobytes())
    return hasher.hexdigest()


@lru_cache(maxsize=4)
def _sorted_names(names: tuple[str, ...]) -> tuple[npt.NDArray[np.intp], bytes]:
    order = sorted(range(len(names)), key=names.__getitem__)
    return np.array(order, dtype=np.intp), json.dumps([names[i] for i in order]).encode()


Bytes = npt.NDArray[np.uint8]


def digest_bytes(data: Bytes) -> int:
    """The digest of bytes (uint8 [n]): unsigned, 64 bits. Releases the interpreter lock."""
    end = data.size // WORD_BYTES * WORD_BYTES
    # numpy's fused product and sum is eight times as fast as torch's int64 multiply.
    words = data[:end].view(np.int32)
    if end < data.size:
        last = np.zeros(WORD_BYTES, dtype=np.uint8)
        last[: data.size - end] = data[end:]
        words = np.concatenate([words, last.view(np.int32)])
    table = multipliers(ROW_WORDS, 1)
    full = len(words) // ROW_WORDS
    rows = np.zeros(full + (len(words) > full * ROW_WORDS), dtype=np.int64)
    if full:
        body = words[: full * ROW_WORDS].reshape(full, ROW_WORDS)
        rows[:full] = np.einsum("ij,j->i", body, table, dtype=np.int64, casting="unsafe")
    if len(rows) > full:
        tail = words[full * ROW_WORDS :]
        rows[full] = np.einsum("j,j->", tail, table[: len(tail)], dtype=np.int64, casting="unsafe")
    with np.errstate(over="ignore"):
        return (int(np.einsum("i,i->", rows, row_multipliers(len(rows)))) ^ data.size) % (1 << 64)
