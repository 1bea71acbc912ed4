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


def test_a_cast_in_the_same_pass_is_torchs_and_changes_no_digest() -> None:
    torch.manual_seed(0)
    sizes = [1, 2, 3, 31, 32768, 65536, 65538, 1 << 20, (1 << 20) + 6, 5 * (1 << 20) + 131074]
    sources = [torch.randn(size).mul(10.0 ** (3 * (i % 3) - 3)) for i, size in enumerate(sizes)]
    sources[3][:4] = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875])  # ties are rounded to even
    sources += [torch.randint(-(1 << 31), (1 << 31) - 1, (200000,), dtype=torch.int32).view(torch.float32)]
    sources[-1].nan_to_num_(0.0, 1.0, -1.0)
    expected = [source.bfloat16() for source in sources]
    targets = [torch.zeros_like(tensor).cuda() for tensor in expected]
    copies = [Copy(index=i, source=s.cuda(), target=targets[i]) for i, s in enumerate(sources)]
    found = prepare_inspection(targets, copies)()
    assert all(
        torch.equal(a.cpu().view(torch.int16), b.view(torch.int16))
        for a, b in zip(targets, expected, strict=True)
    )
    assert unsigned(found.digests) == digests(expected)
    assert found.nonfinite.bool().tolist() == [not tensor.isfinite().all() for tensor in expected]


def test_casts_and_copies_of_one_list() -> None:
    kept = torch.randn(3, 70000).bfloat16().cuda()
    wide = torch.randn(70002).cuda()
    wide[-1] = float("inf")
    block = torch.zeros(70002, dtype=torch.bfloat16, device="cuda")
    moved, again = torch.zeros_like(kept), torch.zeros_like(kept)
    copies = [
        Copy(index=0, source=kept, target=moved),
        Copy(index=1, source=wide, target=block),
        Copy(index=0, source=kept, target=again),
    ]
    found = prepare_inspection([kept, block], copies)()
    assert torch.equal(moved, kept) and torch.equal(again, kept)
    assert torch.equal(block, wide.bfloat16())
    assert unsigned(found.digests) == digests([kept, wide.bfloat16()])
    assert found.nonfinite.bool().tolist() == [False, True]


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
