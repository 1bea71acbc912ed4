"""Digests on a CUDA device, and the copies that the kernel makes."""

import pytest
import torch

from deployments.weights.wire.digest import digests, inspect, prepare_inspection
from deployments.weights.wire.digest_definition import Copy, unsigned

pytestmark = pytest.mark.gpu

SIZES = [0, 1, 2, 3, 4, 5, 31, 65535, 65536, 65537, 65538, 1 << 20, (1 << 20) + 3, 3 * (1 << 20) + 65541]


def of_all_sizes() -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
    return [*tensors, torch.randn(33, 65).bfloat16(), torch.randn(1001, 333), torch.randn(5)[1:].half()]


def test_they_equal_those_of_the_host() -> None:
    tensors = of_all_sizes()
    assert digests([tensor.cuda() for tensor in tensors]) == digests(tensors)
    shifted = torch.randint(0, 256, (70001,), dtype=torch.uint8)
    assert digests([shifted.cuda()[1:]]) == digests([shifted[1:].clone()])


def test_fused_copies_are_made_and_change_no_digest() -> None:
    tensors = [tensor.cuda() for tensor in of_all_sizes()]
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    pairs = zip(tensors, targets, strict=True)
    copies = [Copy(index=index, source=source, target=to) for index, (source, to) in enumerate(pairs)]
    found = prepare_inspection(tensors, copies)()
    assert unsigned(found.digests) == digests(tensors)
    assert all(torch.equal(a, b) for a, b in zip(targets, tensors, strict=True))


def test_what_is_not_finite_is_found() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    wrong = [torch.randn(40000).to(dtype) for dtype in dtypes]
    for index, tensor in enumerate(wrong):
        tensor[39999 - index] = float("inf") if index else float("nan")
    fine = [torch.randn(40001).to(dtype) for dtype in dtypes]
    found = inspect([t.cuda() for t in [*wrong, *fine]]).nonfinite.bool().tolist()
    assert found == [True] * 3 + [False] * 3


def test_an_inspection_that_is_repeated_reads_the_present_content() -> None:
    storage = torch.zeros(70001, dtype=torch.uint8, device="cuda")
    tensors = [storage[:65536], storage[1:]]  # the second one is not aligned
    inspection = prepare_inspection(tensors, ())
    inspection()
    storage.copy_(torch.randint(0, 256, (70001,), dtype=torch.uint8))
    assert unsigned(inspection().digests) == digests([storage.cpu()[:65536], storage.cpu()[1:].clone()])
