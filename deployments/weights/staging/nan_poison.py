"""NaN in the first and last column of every parameter shows where loading has not written yet: shards are
ranges of rows or whole tensors. One kernel writes and one searches: torch's fused calls take 4 ms at 8B."""

import numpy as np
import numpy.typing as npt
import torch
from vllm.triton_utils import tl, triton

from deployments.weights.staging.base import outer_columns

ROWS = 1024

# The bits of NaN and of infinity without the sign: what is larger than infinity is NaN.
_FORMATS = {
    torch.bfloat16: (0x7FC0, 0x7F80),
    torch.float16: (0x7E00, 0x7C00),
    torch.float32: (0x7FC00000, 0x7F800000),
}


class NanPoison:
    """The shadow's parameters must stay where they are. Integers get no poison."""

    def __init__(self, shadow: torch.nn.Module, model: torch.nn.Module) -> None:
        live = dict(model.named_parameters())
        self._parameters = {
            name: (parameter.data, live[name].data)
            for name, parameter in shadow.named_parameters()
            if parameter.dtype in _FORMATS and parameter.numel() and name in live
        }
        tensors = [poisoned for poisoned, _ in self._parameters.values()]
        self._table = torch.from_numpy(_groups(tensors)).to(next(shadow.parameters()).device)
        # Transposed tensors are few: torch writes them, through views.
        self._strided = {
            i: outer_columns(tensor) for i, tensor in enumerate(tensors) if not tensor.is_contiguous()
        }

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def warm_up(self) -> None:
        """Compile the kernels. The shadow's content is undefined afterwards."""
        self.apply()
        self.remaining()

    def apply(self) -> None:
        self._launch(self._table, SET=True)
        for columns in self._strided.values():
            columns.fill_(float("nan"))

    def remaining(self) -> list[str]:
        found = torch.zeros(len(self._parameters), dtype=torch.int64, device=self._table.device)
        self._launch(found, SET=False)
        for index, columns in self._strided.items():
            found[index] = columns.isnan().any()
        return [name for name, left in zip(self._parameters, found.tolist(), strict=True) if left]

    def _launch(self, found: torch.Tensor, **mode: bool) -> None:
        if len(self._table):
            _visit[(len(self._table),)](self._table, found, COUNT=ROWS, **mode)

    def restore_live(self, names: list[str]) -> None:
        for name in names:
            shadow, live = self._parameters[name]
            shadow.copy_(torch.where(shadow.isnan(), live, shadow))


@triton.jit
def _visit(  # type: ignore[no-untyped-def]
    # int64 [g, 8]: address, rows, bytes per row, bytes to the last column, bytes per element, NaN, infinity,
    # the parameter's index in `found`
    groups,
    found,  # int64 [n]: 1 where poison was found
    COUNT: tl.constexpr,
    SET: tl.constexpr,
) -> None:
    entry = groups + tl.program_id(0).to(tl.int64) * 8
    lanes = tl.arange(0, COUNT)
    mask = lanes < tl.load(entry + 1)
    first = tl.load(entry) + lanes.to(tl.int64) * tl.load(entry + 2)
    last = first + tl.load(entry + 3)
    narrow = tl.load(entry + 4) == 2
    nan = tl.load(entry + 5).to(tl.int32)
    limit = tl.load(entry + 6).to(tl.int32)
    if SET:
        if narrow:
            tl.store(first.to(tl.pointer_type(tl.int16)), nan.to(tl.int16), mask=mask)
            tl.store(last.to(tl.pointer_type(tl.int16)), nan.to(tl.int16), mask=mask)
        else:
            tl.store(first.to(tl.pointer_type(tl.int32)), nan, mask=mask)
            tl.store(last.to(tl.pointer_type(tl.int32)), nan, mask=mask)
    else:
        left = tl.zeros([COUNT], dtype=tl.int32)
        right = tl.zeros([COUNT], dtype=tl.int32)
        if narrow:
            left = tl.load(first.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int32) & 0x7FFF
            right = tl.load(last.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int32) & 0x7FFF
        else:
            left = tl.load(first.to(tl.pointer_type(tl.int32)), mask=mask, other=0) & 0x7FFFFFFF
            right = tl.load(last.to(tl.pointer_type(tl.int32)), mask=mask, other=0) & 0x7FFFFFFF
        is_set = tl.max(((left > limit) | (right > limit)).to(tl.int32), axis=0)
        tl.atomic_max(found + tl.load(entry + 7), is_set.to(tl.int64), sem="relaxed")


def _groups(tensors: list[torch.Tensor]) -> npt.NDArray[np.int64]:
    """The kernel's work list (int64 [g, 8], see `_visit`) for contiguous tensors."""
    parts = [np.empty((0, 8), dtype=np.int64)]
    for index, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            continue
        columns = tensor.shape[-1] if tensor.dim() > 1 else 1
        rows = tensor.numel() // columns
        starts = np.arange(0, rows, ROWS, dtype=np.int64)
        stride = columns * tensor.itemsize
        part = np.empty((len(starts), 8), dtype=np.int64)
        part[:, 0] = tensor.data_ptr() + starts * stride
        part[:, 1] = np.minimum(rows - starts, ROWS)
        part[:, 2:] = stride, stride - tensor.itemsize, tensor.itemsize, *_FORMATS[tensor.dtype], index
        parts.append(part)
    return np.concatenate(parts)
