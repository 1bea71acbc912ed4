import pytest
import torch

from deployments.weights.transports.weight_sender import ChunkPacker
from deployments.weights.wire.chunk_layout import packed_chunk
from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import unsigned
from tests.deployments.weights.transports.transport_fleet import ListSource, Resident, Tensors


def tensors() -> Tensors:
    return [("a", torch.randn(3, 5)), ("b", torch.arange(7)), ("c", torch.randn(2).bfloat16())]


def packed(packer: ChunkPacker) -> Tensors:
    """What a receiver reads; its digests are those that were sent."""
    packer.begin()
    found: Tensors = []
    for index, chunk in enumerate(packer.chunks):
        block = torch.empty(chunk.size_bytes, dtype=torch.uint8)
        packer.pack(index, block)
        received = packed_chunk(chunk, block)
        assert unsigned(received.sent) == digests(received.read())
        found += received.named()
    return found


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, a), (_, b) in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("kind", [ListSource, Resident])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_every_tensor_is_packed_in_its_order(kind: type[ListSource], chunk_bytes: int) -> None:
    source = kind(tensors())
    packer = ChunkPacker(source, chunk_bytes)
    assert len(packer.chunks) == (3 if chunk_bytes == 1 else 1)
    for _ in range(2):
        assert_same(packed(packer), source.tensors)


def test_resident_tensors_are_in_place_unless_one_is_cast() -> None:
    declared = tensors()
    assert ChunkPacker(ListSource(declared), 1 << 20).resident is None
    as_declared = ChunkPacker(Resident(declared), 1 << 20)
    assert as_declared.in_place is as_declared.resident is not None
    cast = Resident([("a", declared[0][1].double()), *declared[1:]], declared)
    packer = ChunkPacker(cast, 1 << 20)
    assert packer.resident is not None and packer.in_place is None
    assert_same(packed(packer), declared)


def test_tensors_that_have_moved_are_packed_from_their_new_memory() -> None:
    source = Resident(tensors())
    packer = ChunkPacker(source, 1 << 20)
    first = packer.resident
    packer.refresh_resident()
    assert packer.resident is first
    source.move()
    source.tensors[0][1].zero_()
    assert_same(packed(packer), source.tensors)
    assert packer.resident is not first


@pytest.mark.parametrize(
    ("resident", "message"),
    [
        (slice(0, 2), r"^the source declared 3 tensors and has 2$"),
        (slice(None, None, -1), r"^the source declared \('a', torch.float32, \(3, 5\)\) and has "),
    ],
)
def test_resident_tensors_that_were_not_declared_are_refused(resident: slice, message: str) -> None:
    declared = tensors()
    with pytest.raises(ValueError, match=message):
        ChunkPacker(Resident(declared[resident], declared), 1 << 20)


def test_a_rank_that_sends_nothing_still_runs_the_pass() -> None:
    seen: list[int] = []
    packer = ChunkPacker(ListSource(tensors(), before=seen.append), 1 << 20)
    packer.begin()
    packer.drain()
    assert seen == [0, 1, 2]
