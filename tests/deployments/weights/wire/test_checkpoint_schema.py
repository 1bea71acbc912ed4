import pytest
import torch

from deployments.weights.wire.checkpoint_schema import TensorSpec, mismatches

EXPECTED = {"w": TensorSpec(dtype="float32", shape=(2, 3)), "n": TensorSpec(dtype="int32", shape=(4,))}
GOOD = {"w": (torch.float32, (2, 3)), "n": (torch.int32, (4,))}


def test_what_fits_has_no_mismatch_and_floats_may_be_cast() -> None:
    assert mismatches(EXPECTED, GOOD, complete=True) == []
    assert mismatches(EXPECTED, GOOD | {"w": (torch.bfloat16, (2, 3))}, complete=True) == []
    assert mismatches(EXPECTED, {"w": GOOD["w"]}, complete=False) == []


def test_weights_of_eight_bits_are_neither_cast_to_nor_from() -> None:
    scaled = {"w": TensorSpec(dtype="float8_e4m3fn", shape=(2, 3))}
    assert mismatches(scaled, {"w": (torch.float8_e4m3fn, (2, 3))}, complete=True) == []
    for expected, dtype in ((scaled, torch.bfloat16), (EXPECTED, torch.float8_e4m3fn)):
        (reason,) = mismatches(expected, {"w": (dtype, (2, 3))}, complete=False)
        assert reason == f"'w' must be of a dtype like {expected['w'].dtype}, got {str(dtype)[6:]}"


@pytest.mark.parametrize(
    ("offered", "reason"),
    [
        (GOOD | {"x": (torch.float32, (1,))}, "'x' is not a tensor of this model"),
        (GOOD | {"w": (torch.float32, (3, 2))}, "'w' must have shape [2, 3], got [3, 2]"),
        (GOOD | {"n": (torch.float32, (4,))}, "'n' must be of a dtype like int32, got float32"),
        (
            {"w": GOOD["w"]},
            "'n' is missing (a version has every tensor of the checkpoint: take from it what is not trained)",
        ),
    ],
)
def test_each_mismatch_is_a_sentence(
    offered: dict[str, tuple[torch.dtype, tuple[int, ...]]], reason: str
) -> None:
    assert mismatches(EXPECTED, offered, complete=True) == [reason]
