"""The digests on a CUDA device, and the copies that are made along with them."""

import pytest
import torch

from deployments.weights.wire.digest import digests, inspect, survey
from deployments.weights.wire.digest_definition import Copy, unsigned

pytestmark = pytest.mark.gpu

SIZES = [0, 1, 2, 3, 4, 5, 31, 65535, 65536, 65537, 65538, 1 << 20, (1 << 20) + 3, 3 * (1 << 20) + 65541]


def of_all_sizes() -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
    return [*tensors, torch.randn(33, 65).bfloat16(), torch.randn(1001, 333), torch.randn(5)[1:].half()]


def test_they_equal_the_hosts() -> None:
    tensors = of_all_sizes()
    assert digests([tensor.cuda() for tensor in tensors]) == digests(tensors)
    shifted = torch.randint(0, 256, (70001,), dtype=torch.uint8)
    assert digests([shifted.cuda()[1:]]) == digests([shifted[1:].clone()])


def test_copies_along_arrive_and_change_no_digest() -> None:
    tensors = [tensor.cuda() for tensor in of_all_sizes()]
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    pairs = zip(tensors, targets, strict=True)
    copies = [Copy(place=place, source=source, target=to) for place, (source, to) in enumerate(pairs)]
    found = survey(tensors, copies)()
    assert unsigned(found.digests) == digests(tensors)
    assert all(torch.equal(a, b) for a, b in zip(targets, tensors, strict=True))


def test_what_is_not_finite_is_found() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    bad = [torch.randn(40000).to(dtype) for dtype in dtypes]
    for index, tensor in enumerate(bad):
        tensor[39999 - index] = float("inf") if index else float("nan")
    fine = [torch.randn(40001).to(dtype) for dtype in dtypes]
    assert inspect([t.cuda() for t in [*bad, *fine]]).bad.bool().tolist() == [True] * 3 + [False] * 3


def test_a_survey_that_is_made_again_sees_what_the_tensors_hold_now() -> None:
    storage = torch.zeros(70001, dtype=torch.uint8, device="cuda")
    tensors = [storage[:65536], storage[1:]]  # the second one is not aligned
    find = survey(tensors, ())
    find()
    storage.copy_(torch.randint(0, 256, (70001,), dtype=torch.uint8))
    assert unsigned(find().digests) == digests([storage.cpu()[:65536], storage.cpu()[1:].clone()])
