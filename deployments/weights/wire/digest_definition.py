"""What a digest is: the 64-bit multilinear hash that every device computes alike, and its multipliers.

Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014): the bytes
are read as 32-bit words, each word is multiplied by a random odd 64-bit number, and the products are
summed modulo 2**64. It is done in two levels, so that the table of multipliers stays in the cache:
words to rows of `ROW_WORDS`, then rows to one number. It detects transport faults (a stale, truncated,
permuted or missing piece); it is no signature against an adversary.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

ROW_WORDS = 16384
DIGEST_BYTES = 8
WORD_BYTES = 4

Words = npt.NDArray[np.int32]
Table = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was found in n tensors, where they are: int64 [n] each. A digest is `sums ^ sizes`."""

    sums: torch.Tensor
    sizes: torch.Tensor  # bytes
    bad: torch.Tensor  # not zero where a tensor holds NaN or infinity

    @property
    def digests(self) -> torch.Tensor:
        return self.sums ^ self.sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """Part of a tensor (`place` says which of a list), to be written over `target`."""

    place: int
    source: torch.Tensor
    target: torch.Tensor


@cache
def multipliers(count: int, stream: int) -> Table:
    """`count` fixed odd 64-bit numbers [count]; the wire format depends on them."""
    numbers = np.random.Generator(np.random.PCG64(stream)).integers(
        np.iinfo(np.int64).min, np.iinfo(np.int64).max, size=count, dtype=np.int64
    )
    return numbers | 1


def row_multipliers(rows: int) -> Table:
    """Multipliers of the second level [rows], drawn in powers of two so that few tables are made."""
    return multipliers(1 << max(rows - 1, 1).bit_length(), 2)[:rows]


def unsigned(found: torch.Tensor) -> list[int]:
    return [value % (1 << 64) for value in found.tolist()]


def combined(names: Sequence[str], found: Sequence[int] | Digests) -> str:
    """One digest of a whole version, independent of the order in which tensors came.

    Args:
        found: the digest of each, unsigned.
    """
    order, text = _by_name(tuple(names))
    hasher = blake2b(text, digest_size=16)
    hasher.update(np.asarray(found, dtype="<u8")[order].tobytes())
    return hasher.hexdigest()


@lru_cache(maxsize=4)
def _by_name(names: tuple[str, ...]) -> tuple[npt.NDArray[np.intp], bytes]:
    """The order of the names, and all of them in that order; the same in every round."""
    order = sorted(range(len(names)), key=names.__getitem__)
    return np.array(order, dtype=np.intp), json.dumps([names[i] for i in order]).encode()
