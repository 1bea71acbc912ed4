import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.weights.wire.chunk_layout import ALIGNMENT, pack, packed_chunk, parse, plan_chunks
from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import unsigned

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8])
SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=12)


@pytest.mark.slow
@given(TENSORS, st.integers(1, 4000))
def test_packed_tensors_are_read_back_with_their_digests(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]], chunk_bytes: int
) -> None:
    tensors = {f"t{i}": torch.randint(-9, 9, shape).to(dtype) for i, (dtype, shape) in enumerate(kinds)}
    metadata = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    source = iter(tensors.items())
    seen = {}
    for chunk in plan_chunks(metadata, chunk_bytes):
        block = torch.zeros(chunk.size_bytes, dtype=torch.uint8)
        pack(chunk, source, block)
        received = packed_chunk(chunk, block)
        found = received.named()
        assert received.sent is not None
        assert unsigned(received.sent) == digests([tensor for _, tensor in found])
        assert all(entry.offset % ALIGNMENT == 0 for entry in chunk.entries)
        seen |= dict(found)
    assert list(seen) == list(tensors)
    assert all(torch.equal(seen[name], tensor) for name, tensor in tensors.items())


@pytest.mark.slow
@given(TENSORS, st.integers(1, 4000))
def test_only_a_tensor_with_a_chunk_of_its_own_may_exceed_the_chunk_size(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]], chunk_bytes: int
) -> None:
    metadata = [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)]
    for chunk in plan_chunks(metadata, chunk_bytes):
        last = chunk.entries[-1]
        assert len(chunk.entries) == 1 or last.offset + last.size_bytes <= chunk_bytes


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "message"),
    [
        (
            ["a"],
            ["float32"],
            [],
            "names, dtype_names and shapes must have one entry per tensor, got 1, 1 and 0",
        ),
        (["a"], ["float99"], [[1]], "tensor 'a': expected the name of a torch dtype, got 'float99'"),
        (["a"], ["load"], [[1]], "tensor 'a': expected the name of a torch dtype, got 'load'"),
        (["a"], ["float32"], [[-1]], "tensor 'a': expected a shape of integers of at least 0, got [-1]"),
        (["a", "b", "a"], ["float32"] * 3, [[1]] * 3, "each tensor must be named once, got 'a' 2 times"),
    ],
)
def test_wrong_metadata_is_refused_with_what_was_expected(
    names: list[str], dtypes: list[str], shapes: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError) as raised:
        parse(names, dtypes, shapes)
    assert str(raised.value) == message


def test_a_source_that_yields_what_it_did_not_declare_is_an_error() -> None:
    (chunk,) = plan_chunks([("a", torch.float32, (2,)), ("b", torch.float32, (2,))], 1 << 20)
    block = torch.zeros(chunk.size_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^the source declared 'b' \(2,\) and yielded 'c' \(2,\)$"):
        pack(chunk, iter([("a", torch.ones(2)), ("c", torch.ones(2))]), block)
    with pytest.raises(ValueError, match=r"^the source declared 'b' \(2,\) and yielded nothing$"):
        pack(chunk, iter([("a", torch.ones(2))]), block)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_source_that_reuses_the_memory_of_what_it_has_yielded_is_an_error(kind: torch.dtype) -> None:
    """Else the first tensor would be sent with the second one's values, and with digests that fit them. What
    is cast has been copied."""
    (chunk,) = plan_chunks([("a", torch.float32, (2,)), ("b", torch.float32, (2,))], 1 << 10)
    block, read = torch.zeros(chunk.size_bytes, dtype=torch.uint8), torch.zeros(2, dtype=kind)
    source = ((name, read.fill_(value)) for name, value in (("a", 1), ("b", 2)))
    if kind is torch.float32:
        with pytest.raises(ValueError, match=r"^the source has overwritten 'a' after it had yielded it$"):
            pack(chunk, source, block)
        return
    pack(chunk, source, block)
    assert [tensor.tolist() for _, tensor in packed_chunk(chunk, block).named()] == [[1, 1], [2, 2]]
