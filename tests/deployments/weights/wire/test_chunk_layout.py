import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.weights.wire.chunk_layout import (
    ALIGNMENT,
    describe,
    layout,
    pack,
    parse,
    plan_chunks,
    sent_digests,
)
from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import unsigned
from deployments.weights.wire.received_chunk import packed

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8])
SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=12)


@given(TENSORS, st.integers(1, 4000))
def test_what_was_packed_comes_out_with_its_digests(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]], chunk_bytes: int
) -> None:
    tensors = {f"t{i}": torch.randint(-9, 9, shape).to(dtype) for i, (dtype, shape) in enumerate(kinds)}
    metadata = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    source = iter(tensors.items())
    seen = {}
    for chunk in plan_chunks(metadata, chunk_bytes):
        block = torch.zeros(chunk.size_bytes, dtype=torch.uint8)
        pack(chunk, source, block)
        found = packed(chunk, block).named()
        assert unsigned(sent_digests(chunk, block)) == digests([tensor for _, tensor in found])
        assert all(entry.offset % ALIGNMENT == 0 for entry in chunk.entries)
        seen |= dict(found)
    assert list(seen) == list(tensors)
    assert all(torch.equal(seen[name], tensor) for name, tensor in tensors.items())


@given(TENSORS, st.integers(1, 4000))
def test_only_a_tensor_alone_may_exceed_the_chunk(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]], chunk_bytes: int
) -> None:
    metadata = [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)]
    for chunk in plan_chunks(metadata, chunk_bytes):
        last = chunk.entries[-1]
        assert len(chunk.entries) == 1 or last.offset + last.size_bytes <= chunk_bytes


def test_metadata_survives_the_wire() -> None:
    metadata = [("a.weight", torch.bfloat16, (2, 3)), ("b", torch.int8, ())]
    wire = describe(metadata)
    assert wire["dtype_names"] == ["bfloat16", "int8"]
    assert parse(**wire) == metadata


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "word"),
    [
        (["a"], ["float32"], [], "1, 1 and 0"),
        (["a"], ["float99"], [[1]], "float99"),
        (["a"], ["float32"], [[-1]], "[-1]"),
        (["a"], ["load"], [[1]], "load"),
        (["a", "b", "a"], ["float32"] * 3, [[1]] * 3, "'a' 2 times"),
    ],
)
def test_bad_metadata_is_refused_with_what_came(
    names: list[str], dtypes: list[str], shapes: list[list[int]], word: str
) -> None:
    with pytest.raises(ValueError, match=word.replace("[", r"\[").replace("]", r"\]")):
        parse(names, dtypes, shapes)


def test_a_payload_that_comes_again_has_the_same_chunks() -> None:
    wire = describe([("a", torch.float32, (2, 3)), ("b", torch.float32, (4,))])
    assert layout(**wire, chunk_bytes=1 << 20) == layout(**wire, chunk_bytes=1 << 20)
    assert layout(**wire, chunk_bytes=1 << 20) != layout(**wire, chunk_bytes=8)
    with pytest.raises(ValueError, match="must be lists of names and numbers"):
        layout([{}], ["float32"], [[2]], 8)  # type: ignore[list-item]


def test_a_source_that_breaks_its_word_is_found() -> None:
    (chunk,) = plan_chunks([("a", torch.float32, (2,)), ("b", torch.float32, (2,))], 1 << 20)
    block = torch.zeros(chunk.size_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"declared 'b' .* yielded 'c'"):
        pack(chunk, iter([("a", torch.ones(2)), ("c", torch.ones(2))]), block)
    with pytest.raises(ValueError, match="yielded nothing"):
        pack(chunk, iter([("a", torch.ones(2))]), block)
