"""Many small tensors from a GPU to host memory in a few copies.

A copy to the host waits for the GPU. Where another process computes on it as well (a replica that decodes,
with transport `ipc`), the GPU is given to one process after the other, and each wait can take milliseconds:
a rank-32 adapter of an 8B model has 504 tensors.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

AT_ONCE = 256 << 20  # bytes; a larger tensor is copied by itself


def host_copies(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The tensors in host memory, contiguous; those that are there already are not copied.

    Args:
        tensors: of any shapes, dtypes and devices.
        dtype: to cast to, on their devices; None: each keeps its own.
    """
    made = [tensor.detach().contiguous() for tensor in tensors]
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(made):
        if tensor.device.type == "cpu":
            made[index] = tensor.to(dtype or tensor.dtype)
        else:
            by_kind[tensor.device, tensor.dtype].append(index)
    for indexes in by_kind.values():
        for batch in _batches(made, indexes):
            copies = copied_together([made[index] for index in batch], dtype)
            for index, copy in zip(batch, copies, strict=True):
                made[index] = copy
    return made


def _batches(tensors: Sequence[torch.Tensor], indexes: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for index in indexes:
        if batch and size + tensors[index].nbytes > AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += tensors[index].nbytes
    yield batch


def copied_together(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Contiguous tensors of one device and dtype in host memory: parts of one tensor there."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = flat.to(dtype or flat.dtype).cpu().split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
