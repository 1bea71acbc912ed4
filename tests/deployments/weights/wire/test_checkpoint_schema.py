from pathlib import Path

import pytest
import torch

from deployments.protocol import TensorSpec
from deployments.weights.wire.checkpoint_schema import MAX_NAMED, checkpoint_manifest, mismatches, sentence
from tests.tiny_models import save_tiny_llama

EXPECTED = {"w": TensorSpec(dtype="float32", shape=(2, 3)), "n": TensorSpec(dtype="int32", shape=(4,))}
GOOD = {"w": (torch.float32, (2, 3)), "n": (torch.int32, (4,))}


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_tells_its_tensors_without_reading_them(tmp_path: Path, tied: bool) -> None:
    manifest = checkpoint_manifest(save_tiny_llama(tmp_path, 1, tied=tied))
    assert manifest is not None
    assert manifest.tensors["model.embed_tokens.weight"] == TensorSpec(dtype="float32", shape=(258, 128))
    assert ("lm_head.weight" in manifest.tensors) is not tied


def test_a_directory_without_weights_has_no_manifest(tmp_path: Path) -> None:
    assert checkpoint_manifest(tmp_path) is None


def test_what_fits_has_no_mismatch_and_floats_may_be_cast() -> None:
    assert mismatches(EXPECTED, GOOD, complete=True) == []
    assert mismatches(EXPECTED, GOOD | {"w": (torch.bfloat16, (2, 3))}, complete=True) == []
    assert mismatches(EXPECTED, {"w": GOOD["w"]}, complete=False) == []


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        (GOOD | {"x": (torch.float32, (1,))}, "'x' is not a tensor of this model"),
        (GOOD | {"w": (torch.float32, (3, 2))}, "'w' must have shape [2, 3], got [3, 2]"),
        (GOOD | {"n": (torch.float32, (4,))}, "'n' must be of a dtype like int32, got float32"),
        ({"w": GOOD["w"]}, "'n' is missing"),
    ],
)
def test_each_mismatch_is_a_sentence(
    offered: dict[str, tuple[torch.dtype, tuple[int, ...]]], words: str
) -> None:
    assert mismatches(EXPECTED, offered, complete=True) == [words]


def test_many_mismatches_are_counted_not_listed() -> None:
    problems = [f"p{i}" for i in range(MAX_NAMED + 3)]
    assert sentence(problems).endswith("p4; and 3 more")
    assert sentence(problems[:2]) == "p0; p1"
