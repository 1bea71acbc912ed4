"""Differences of blocks on a GPU."""

import pytest
import torch

from deployments.weights.wire.delta_cuda import apply_delta, encode_delta

pytestmark = pytest.mark.gpu

SIZES = [8, 256, 264, 8200, 256 * 33, 256 * 64 + 40, 1 << 24]


def block(size: int) -> torch.Tensor:
    torch.manual_seed(size)
    return torch.randint(256, (size,), dtype=torch.uint8, device="cuda")


def changed(base: torch.Tensor, share: float) -> torch.Tensor:
    new = base.clone()
    words = new.view(torch.int16)
    words[torch.rand(words.shape, device="cuda") < share] ^= 1
    return new


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.03, 0.1, 0.5, 1.0])
def test_a_base_and_a_delta_make_the_block(size: int, share: float) -> None:
    base = block(size)
    new, kept = changed(base, share), base.clone()
    delta = encode_delta(new, kept)
    assert torch.equal(kept, new), "the next delta is of this one"
    if delta is None:
        assert size == 8 or share >= 0.03, f"{share} of {size} bytes is larger as a difference"
        return
    assert len(delta) <= size / 2
    apply_delta(delta, base)
    assert torch.equal(base, new)


def test_at_three_percent_it_takes_a_fifteenth_of_the_bytes() -> None:
    base = block(1 << 24)
    delta = encode_delta(changed(base, 0.03), base)
    assert delta is not None and len(delta) < len(base) / 15


def test_a_damaged_delta_touches_only_the_block() -> None:
    base, around = block(8200), torch.full((3 * 8192 + 8200,), 7, dtype=torch.uint8, device="cuda")
    place = around[8192 : 8192 + 8200]
    delta = encode_delta(changed(base, 0.1), base.clone())
    assert delta is not None
    for index in range(0, len(delta), 5):
        damaged = delta.clone()
        damaged[index] ^= 0xFF
        place.copy_(base)
        apply_delta(damaged, place)
        assert (around[:8192] == 7).all() and (around[8192 + 8200 :] == 7).all()
    with pytest.raises(ValueError, match=r"^expected a delta of a block of 8200 bytes, got one of another$"):
        apply_delta(delta[:-16], place)
