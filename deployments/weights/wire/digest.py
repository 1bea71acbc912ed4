"""Digests of tensors, computed where the bytes are: on the host here, on a GPU by `digest_cuda`, which queues
the work and raises ValueError for tensors over 16 GiB."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from deployments.weights.wire.digest_definition import Copy, Findings, digest_bytes, unsigned

_WARMED_UP = (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16)
T = TypeVar("T")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> int:
    return digests([tensor])[0]


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    return unsigned(digest_tensor(tensors))


def digest_tensor(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if tensors and tensors[0].is_cuda:
        return inspect(tensors).digests
    return signed([digest_bytes(t.detach().reshape(-1).view(torch.uint8).numpy()) for t in tensors])


def signed(digests: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(digests, dtype=np.uint64).view(np.int64))


def inspect(tensors: Sequence[torch.Tensor]) -> Findings:
    """Digests, and which tensors hold NaN or infinity (on a GPU not float8 and float64). Tensors are
    contiguous, on one device."""
    return prepare_inspection(tensors, ())()


def prepare_inspection(tensors: Sequence[torch.Tensor], copies: Sequence[Copy]) -> Callable[[], Findings]:
    """`inspect`, to call in every round. Also makes `copies`, on a GPU whole tensors' in its kernel."""
    if not (tensors and tensors[0].is_cuda):
        return _after(copies, partial(_host_findings, tensors))
    from deployments.weights.wire.digest_cuda import CudaInspection, is_castable, is_fusable

    targets: dict[int, torch.Tensor] = {}
    sources: dict[int, torch.Tensor] = {}
    separate = []
    for copy in copies:
        tensor = tensors[copy.index]
        if _is_same(copy.target, tensor) and is_castable(copy.source, copy.target):
            sources[copy.index] = copy.source
        elif copy.index not in targets and _is_same(copy.source, tensor) and is_fusable(tensor, copy.target):
            targets[copy.index] = copy.target
        else:
            separate.append(copy)
    return _after(separate, CudaInspection(tensors, targets, sources))


def prepare_digests(tensors: Sequence[torch.Tensor], copies: Sequence[Copy]) -> Callable[[], torch.Tensor]:
    if not (tensors and tensors[0].is_cuda):
        return _after(copies, partial(digest_tensor, tensors))
    inspection = prepare_inspection(tensors, copies)
    return lambda: inspection().digests


def prepare_copies(copies: Sequence[Copy]) -> Callable[[], None]:
    return _after(copies, lambda: None)


def warm_up(device: torch.device) -> None:
    """Compile the GPU kernels, which takes a second."""
    if device.type != "cuda":
        return
    number, wide, *targets = (torch.zeros(8, dtype=kind, device=device) for kind in _WARMED_UP)
    copies = [Copy(index=i, source=source, target=targets[i]) for i, source in enumerate((number, wide))]
    prepare_inspection([number, targets[1]], copies)()
    inspect([number])


def _after(copies: Sequence[Copy], inspection: Callable[[], T]) -> Callable[[], T]:
    if not copies:
        return inspection
    sources, targets = [], []
    for copy in copies:
        source, target = copy.source, copy.target
        kind = _INTEGERS.get(source.dtype.itemsize)
        if kind is not None and source.dtype == target.dtype:
            # A foreach copy of floats may change the bits of a NaN.
            source, target = source.view(kind), target.view(kind)
        sources.append(source)
        targets.append(target)

    def copy_and_inspect() -> T:
        torch._foreach_copy_(targets, sources)
        return inspection()

    return copy_and_inspect


def _is_same(part: torch.Tensor, tensor: torch.Tensor) -> bool:
    return part.data_ptr() == tensor.data_ptr() and part.shape == tensor.shape


def _host_findings(tensors: Sequence[torch.Tensor]) -> Findings:
    flags = [not is_finite(tensor) for tensor in tensors]
    sizes = torch.tensor([tensor.numel() * tensor.itemsize for tensor in tensors], dtype=torch.int64)
    nonfinite = torch.tensor(flags).long()
    return Findings(sums=digest_tensor(tensors) ^ sizes, sizes=sizes, nonfinite=nonfinite)


def is_finite(tensor: torch.Tensor) -> bool:
    """Several times as fast as `torch.isfinite` on a CPU."""
    # Finite if all terms are: float32 can hold the sum of any real model's weights. So can bfloat16, in a
    # third of the time without a cast; torch accumulates in float32.
    dtype = torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float32
    return not tensor.is_floating_point() or bool(tensor.sum(dtype=dtype).isfinite())
