import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.weights.wire.digest import digest, digests
from deployments.weights.wire.digest_definition import ROW_WORDS, multipliers, row_multipliers, version_digest


def by_definition(data: bytes) -> int:
    """The digest, word by word, as the module's docstring describes it."""
    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]
    table = [int(value) for value in multipliers(ROW_WORDS, 1)]
    rows = [words[i : i + ROW_WORDS] for i in range(0, len(words), ROW_WORDS)]
    sums = [sum(w * table[i] for i, w in enumerate(row)) for row in rows]
    second = [int(value) for value in row_multipliers(len(rows))]
    total = sum(s * second[i] for i, s in enumerate(sums)) % (1 << 64)
    return total ^ len(data)


@pytest.mark.slow
@given(st.binary(min_size=1, max_size=300))
def test_it_is_the_two_level_sum_of_products_for_all_sizes(data: bytes) -> None:
    assert digest(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == by_definition(data)


@given(st.integers(0, 999), st.integers(0, 31))
def test_one_flipped_bit_changes_it(word: int, bit: int) -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    changed = tensor.clone()
    changed[word] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert digest(tensor) != digest(changed)


def test_swapped_and_negated_numbers_change_it() -> None:
    tensor = torch.randn(4096)
    swapped = tensor.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    negated = tensor.clone()
    negated[[5, 9]] *= -1  # two sign bits: they would cancel in a sum of whole 64-bit words
    assert len({digest(tensor), digest(swapped), digest(negated)}) == 3


def test_dtype_and_shape_do_not_matter_but_bytes_do() -> None:
    tensor = torch.randn(8, 6)
    assert digest(tensor) == digest(tensor.view(torch.int32).view(-1))
    assert digests([tensor, tensor.to(torch.bfloat16)])[0] != digest(tensor.to(torch.bfloat16))


def test_the_digest_of_a_version_depends_on_names_but_not_on_order() -> None:
    assert version_digest(["a", "b"], [1, 1 << 63]) == version_digest(["b", "a"], [1 << 63, 1])
    assert version_digest(["a", "b"], [1, 2]) != version_digest(["a", "b"], [2, 1])
    assert version_digest(["a", "b"], [1, 2]) != version_digest(["a", "c"], [1, 2])
