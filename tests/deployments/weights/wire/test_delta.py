from itertools import product

import numpy as np
import pytest

from deployments.weights.wire.delta import PIECE_WORDS, ROW_WORDS, apply_delta, encode_delta
from deployments.weights.wire.digest_definition import Bytes

SIZES = [0, 8, 2 * ROW_WORDS, 2 * ROW_WORDS + 8, 2 * PIECE_WORDS, 4 * PIECE_WORDS + 1000]


def block(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def changed(base: Bytes, share: float) -> Bytes:
    """A copy in which each word has changed with this probability."""
    new = base.copy()
    new.view(np.uint16)[np.random.default_rng(1).random(base.size // 2) < share] ^= 1
    return new


def test_a_delta_makes_the_new_block_of_its_base_bit_for_bit_at_both_ends() -> None:
    for size, share in product(SIZES, (0.0, 0.01, 0.2)):
        base = block(size)
        there, new = base.copy(), changed(base, share)
        delta = encode_delta(new, base)
        assert np.array_equal(base, new), (size, share)
        if delta is None:
            assert size == 8, f"{share} of {size} bytes is larger as a difference"
            continue
        apply_delta(delta, there)
        assert np.array_equal(there, new), (size, share)


def test_whole_rows_and_the_ends_of_a_block_may_change() -> None:
    base = np.zeros(8 * PIECE_WORDS, dtype=np.uint8)
    there, new = base.copy(), base.copy()
    for begin, end in ((0, 1), (ROW_WORDS, 2 * ROW_WORDS), (PIECE_WORDS - 1, PIECE_WORDS + 1), (-1, None)):
        new.view(np.uint16)[begin:end] = 0xFFFF
    delta = encode_delta(new, base)
    assert delta is not None
    apply_delta(delta, there)
    assert np.array_equal(there, new)


def test_three_percent_take_a_fifteenth_and_a_block_that_changed_throughout_is_not_encoded() -> None:
    base = block(16 * PIECE_WORDS)
    delta = encode_delta(changed(base, 0.03), base)
    assert delta is not None and delta.size < base.size / 15
    new = changed(base, 0.5)
    assert encode_delta(new, base) is None
    assert np.array_equal(base, new), "the next delta is of this one"


def test_a_delta_of_another_block_is_refused() -> None:
    base = block(4 * PIECE_WORDS + 1000)
    delta = encode_delta(changed(base, 0.01), base)
    assert delta is not None
    for other in (2 * ROW_WORDS, 4 * PIECE_WORDS, 4 * PIECE_WORDS + 2000):
        with pytest.raises(ValueError, match=f"^expected a delta of a block of {other} bytes"):
            apply_delta(delta, block(other))


def test_a_damaged_delta_never_writes_beyond_its_block() -> None:
    base = block(2 * ROW_WORDS + 24)
    delta = encode_delta(changed(base, 0.1), base.copy())
    assert delta is not None
    for index in range(delta.size):
        damaged = delta.copy()
        damaged[index] ^= 0xFF
        memory = np.full(base.size + 4096, 7, dtype=np.uint8)
        memory[: base.size] = base
        try:
            apply_delta(damaged, memory[: base.size])
        except ValueError:
            continue
        assert (memory[base.size :] == 7).all()
