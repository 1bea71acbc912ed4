"""Digests on a CUDA device, bit for bit those of `digest.py`, and the search for NaN, in one pass.

A tensor's words are a matrix of rows of `ROW_WORDS`. Sums modulo 2**64 have no order: a program takes a band
of columns over a group of rows, multiplies each word by its row's number, and at the end by the column's
numbers. The large column table is read once.

A table made on the host lists any number of tensors' groups for one launch. The kernel can also copy the
words, and in a launch of its own cast float32 to bfloat16; the digest is that of the cast.
"""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from vllm.triton_utils import tl, triton

from deployments.weights.wire.digest_definition import (
    ROW_WORDS,
    WORD_BYTES,
    Findings,
    multipliers,
    row_multipliers,
)

ROW_BYTES = ROW_WORDS * 4
GROUP_ROWS = 16
COLUMNS = 2048
_ALIGNMENT = 16  # the kernel promises this to the compiler, for wide loads
_MAX_ROWS = 1 << 18  # 16 GiB
_FIELDS = 8  # per group: aligned, and one compiled kernel serves all tables

# The exponent bits in a word's low and high half: all set means NaN or infinity.
_EXPONENTS = {
    torch.bfloat16: (0x7F80, 0x7F800000),
    torch.float16: (0x7C00, 0x7C000000),
    torch.float32: (0, 0x7F800000),
}


@triton.jit
def _cast(pair):  # type: ignore[no-untyped-def]
    """Two float32 numbers (int64) as two of bfloat16 (int32), rounded to nearest even as torch does."""
    low = pair.to(tl.int32).to(tl.float32, bitcast=True).to(tl.bfloat16).to(tl.int16, bitcast=True)
    high = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True).to(tl.bfloat16).to(tl.int16, bitcast=True)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def _digest_groups(  # type: ignore[no-untyped-def]
    groups,  # int64 [g, 8]: address, bytes to digest, first row, tensor, two exponent masks, target or 0, 0
    column_table,  # int64 [ROW]
    row_table,  # int64 [rows of the largest tensor]
    found,  # int64 [n], zero
    nonfinite,  # int64 [n], zero
    ROW: tl.constexpr,
    BAND: tl.constexpr,
    COPY: tl.constexpr,
    CAST: tl.constexpr,
) -> None:
    entry = groups + tl.program_id(0).to(tl.int64) * 8
    band = tl.program_id(1)
    address = tl.load(entry)
    size = tl.load(entry + 1)
    first_row = tl.load(entry + 2)
    tensor = tl.load(entry + 3)
    low = tl.load(entry + 4).to(tl.int32)
    high = tl.load(entry + 5).to(tl.int32)
    target = tl.load(entry + 6)
    # With CAST an element holds the two float32 numbers of a word.
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int64 if CAST else tl.int32)), 16)
    copies = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    columns = band * BAND + tl.arange(0, BAND)
    sums = tl.zeros([BAND], dtype=tl.int64)
    flags = tl.zeros([BAND], dtype=tl.int32)
    full_words = size // 4
    full_rows = (full_words // ROW).to(tl.int32)
    # Full rows have no mask: only unmasked loads are wide.
    for row in range(0, full_rows):
        word = tl.load(words + row * ROW + columns)
        if CAST:
            word = _cast(word)
        if COPY:  # noqa: SIM102 - a branch at compile time, then one at run time
            if target != 0:
                tl.store(copies + row * ROW + columns, word)
        sums += word.to(tl.int64) * tl.load(row_table + first_row + row)
        flags |= ((low != 0) & ((word & low) == low)).to(tl.int32)
        flags |= ((high != 0) & ((word & high) == high)).to(tl.int32)
    if full_rows * ROW < full_words:
        at = full_rows * ROW + columns
        part = tl.load(words + at, mask=at < full_words, other=0)
        if CAST:
            part = _cast(part)
        if COPY:  # noqa: SIM102 - a branch at compile time, then one at run time
            if target != 0:
                tl.store(copies + at, part, mask=at < full_words)
        sums += part.to(tl.int64) * tl.load(row_table + first_row + full_rows)
        flags |= ((low != 0) & ((part & low) == low)).to(tl.int32)
        flags |= ((high != 0) & ((part & high) == high)).to(tl.int32)
    total = tl.sum(sums * tl.load(column_table + columns), axis=0)
    any_nonfinite = tl.max(flags, axis=0)
    rest = size - full_words * 4
    if (band == 0) & (rest > 0):
        # The last one to three bytes are a word, padded with zeros.
        lanes = tl.arange(0, 4)
        tail = tl.load(
            address.to(tl.pointer_type(tl.uint8)) + full_words * 4 + lanes, mask=lanes < rest, other=0
        )
        last = tl.sum(tail.to(tl.int32) << (8 * lanes), axis=0)
        row_number = tl.load(row_table + first_row + full_words // ROW)
        column_number = tl.load(column_table + full_words % ROW)
        total += last.to(tl.int64) * row_number * column_number
        any_nonfinite = tl.maximum(any_nonfinite, ((low != 0) & ((last & low) == low)).to(tl.int32))
    tl.atomic_add(found + tensor, total, sem="relaxed")
    tl.atomic_max(nonfinite + tensor, any_nonfinite.to(tl.int64), sem="relaxed")


class CudaInspection:
    """Inspects the same tensors in every round: the work list is made and uploaded once.

    Args:
        tensors: on one CUDA device, at most 16 GiB each.
        targets: by index, tensors to which the kernel copies them; see `is_fusable`.
        sources: by index, tensors from which the kernel fills them; see `is_castable`.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        targets: Mapping[int, torch.Tensor],
        sources: Mapping[int, torch.Tensor],
    ) -> None:
        self._device = tensors[0].device
        self._original, self._targets, self._sources = tensors, targets, sources
        self._prepare()

    def _prepare(self) -> None:
        # Copies of misaligned tensors may be freed: the allocator reuses memory in stream order.
        tensors = self._original
        self._tensors = [_readable(tensor) for tensor in tensors]
        # A copy does not follow its tensor: make it again for the next call.
        self._has_copies = any(
            used is not tensor for used, tensor in zip(self._tensors, tensors, strict=True)
        )
        self._outdated = False
        sizes = np.array([tensor.numel() * tensor.itemsize for tensor in self._tensors], dtype=np.int64)
        groups = _groups(self._tensors, sizes, self._targets, self._sources)
        casts = np.isin(groups[:, 3], list(self._sources))
        self._cast_count = int(casts.sum())
        self._count = len(groups) - self._cast_count
        groups = np.concatenate([groups[~casts], groups[casts]])
        # Pinned: a copy from pageable memory waits for the stream.
        upload = torch.from_numpy(np.concatenate([groups.reshape(-1), sizes])).pin_memory()
        self._table = upload.to(self._device, non_blocking=True)
        self._sizes = self._table[groups.size :]

    def __call__(self) -> Findings:
        if self._outdated:
            self._prepare()
        self._outdated = self._has_copies
        count = len(self._tensors)
        # An even number aligns both rows: Triton recompiles for other pointers.
        zeros = torch.zeros(2, count + count % 2, dtype=torch.int64, device=self._device)
        sums, nonfinite = zeros[:, :count]
        with torch.cuda.device(self._device):
            self._launch(0, self._count, sums, nonfinite, cast=False)
            self._launch(self._count, self._cast_count, sums, nonfinite, cast=True)
        return Findings(sums=sums, sizes=self._sizes, nonfinite=nonfinite)

    def _launch(
        self, first: int, count: int, sums: torch.Tensor, nonfinite: torch.Tensor, *, cast: bool
    ) -> None:
        if not count:
            return
        _digest_groups[(count, ROW_WORDS // COLUMNS)](
            self._table[first * _FIELDS :],
            _column_table(self._device),
            _row_table(self._device),
            sums,
            nonfinite,
            ROW=ROW_WORDS,
            BAND=COLUMNS,
            COPY=cast or bool(self._targets),
            CAST=cast,
            num_warps=4,
        )


def is_fusable(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the kernel can copy `source` to `target` as it reads: aligned, contiguous, full words."""
    return source.dtype == target.dtype and _are_wide(source, target)


def is_castable(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the kernel can fill `target` (bfloat16) from `source` (float32); else as `is_fusable`."""
    return (source.dtype, target.dtype) == (torch.float32, torch.bfloat16) and _are_wide(source, target)


def _are_wide(source: torch.Tensor, target: torch.Tensor) -> bool:
    return (
        source.device == target.device
        and source.shape == target.shape
        and source.is_contiguous()
        and target.is_contiguous()
        and source.data_ptr() % _ALIGNMENT == 0
        and target.data_ptr() % _ALIGNMENT == 0
        and target.numel() * target.itemsize % WORD_BYTES == 0
    )


def _groups(
    tensors: Sequence[torch.Tensor],
    sizes: npt.NDArray[np.int64],
    targets: Mapping[int, torch.Tensor],
    sources: Mapping[int, torch.Tensor],
) -> npt.NDArray[np.int64]:
    """The kernel's work list, int64 [g, 8]; see `_digest_groups`."""
    span = GROUP_ROWS * ROW_BYTES
    if len(sizes) and int(sizes.max()) > _MAX_ROWS * ROW_BYTES:
        raise ValueError(f"expected at most {_MAX_ROWS * ROW_BYTES} bytes in a tensor, got {sizes.max()}")
    counts = -(-sizes // span)
    owner = np.repeat(np.arange(len(sizes)), counts)
    group = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)  # within its tensor
    read = [sources.get(index, tensor) for index, tensor in enumerate(tensors)]
    addresses = np.array([tensor.data_ptr() for tensor in read], dtype=np.int64)
    # Bytes read for a byte that is digested.
    scale = np.array([t.itemsize // of.itemsize for t, of in zip(read, tensors, strict=True)], dtype=np.int64)
    exponents = np.array([_EXPONENTS.get(t.dtype, (0, 0)) for t in tensors], dtype=np.int64).reshape(-1, 2)
    copied_to = np.zeros(len(sizes), dtype=np.int64)
    for index, target in targets.items():
        copied_to[index] = target.data_ptr()
    for index in sources:
        copied_to[index] = tensors[index].data_ptr()
    table = np.empty((len(owner), _FIELDS), dtype=np.int64)
    table[:, 0] = addresses[owner] + group * span * scale[owner]
    table[:, 1] = np.minimum(sizes[owner] - group * span, span)
    table[:, 2] = group * GROUP_ROWS
    table[:, 3] = owner
    table[:, 4:6] = exponents[owner]
    table[:, 7] = 0
    table[:, 6] = np.where(copied_to[owner] == 0, 0, copied_to[owner] + group * span)
    return table


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@cache
def _column_table(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(multipliers(ROW_WORDS, 1)).to(device)


@cache
def _row_table(device: torch.device) -> torch.Tensor:
    # A shorter table is a prefix of a longer one.
    return torch.from_numpy(row_multipliers(_MAX_ROWS)).to(device)
