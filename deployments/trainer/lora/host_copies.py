"""Copies of a trainer's tensors in host memory, made by a thread beside the one that sends an adapter.

On a GPU both would use the same stream: what is sent would wait for the copy, which for an adapter and its
optimizer's moments is longer than the transfer. So copies have a stream of their own. They go to pinned
memory, which is quicker, and because one to pageable memory may hold up what other threads queue: suspected,
not shown (`benchmarks/RESULTS.md`, "GPU tests that passed").
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

COPIED_AT_ONCE = 256 << 20  # bytes; a larger tensor is copied by itself


def in_host_memory(content: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in host memory; the same if it is there already.

    From a GPU it is copied to pinned memory, which torch keeps for the next one: into new pageable memory a
    copy is thirty times as long (`benchmarks/RESULTS.md`).
    """
    if content.device.type != "cuda":
        return content
    copy = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
    with _beside(content.device):
        copy.copy_(content, non_blocking=True)
        torch.cuda.current_stream(content.device).synchronize()
    return copy


def host_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in host memory, contiguous; those that are there already are not copied.

    Many small ones leave a GPU in few copies. Each copy waits for the GPU, and where another process computes
    on it as well (a replica that decodes, with transport `ipc`) that can take milliseconds: a rank-32 adapter
    of an 8B model has 504 tensors.

    Args:
        tensors: of any shapes, dtypes and devices.
    """
    made = [tensor.detach().contiguous() for tensor in tensors]
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(made):
        if tensor.device.type != "cpu":
            by_kind[tensor.device, tensor.dtype].append(index)
    for indexes in by_kind.values():
        for batch in _batches(made, indexes):
            copies = copied_together([made[index] for index in batch])
            for index, copy in zip(batch, copies, strict=True):
                made[index] = copy
    return made


def _batches(tensors: Sequence[torch.Tensor], indexes: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for index in indexes:
        if batch and size + tensors[index].nbytes > COPIED_AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += tensors[index].nbytes
    yield batch


def copied_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous tensors of one device and dtype in host memory: parts of one tensor there."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    copy = in_host_memory(flat)
    if copy is not flat:
        copy = copy.clone()  # so that pinned memory is one batch, however many there are
    parts = copy.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """What is copied inside waits for what is queued on the device's current stream, and what is queued there
    later does not wait for it."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
