import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deployments.weights.wire.checkpoint_schema import (
    INDEX,
    MAX_NAMED,
    TensorSpec,
    join_reasons,
    mismatches,
    read_schema,
)
from tests.tiny_models import save_tiny_llama

EXPECTED = {"w": TensorSpec(dtype="float32", shape=(2, 3)), "n": TensorSpec(dtype="int32", shape=(4,))}
GOOD = {"w": (torch.float32, (2, 3)), "n": (torch.int32, (4,))}


@pytest.mark.parametrize("tied", [False, True])
def test_the_schema_is_read_from_the_headers_alone(tmp_path: Path, tied: bool) -> None:
    directory = save_tiny_llama(tmp_path, 1, tied=tied)
    (file,) = directory.glob("*.safetensors")
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    os.truncate(file, header_bytes)
    schema = read_schema(directory)
    assert schema is not None
    assert schema["model.embed_tokens.weight"] == TensorSpec(dtype="float32", shape=(258, 128))
    assert ("lm_head.weight" in schema) is not tied


@pytest.mark.parametrize("content", [b"", b"123", (5).to_bytes(8, "little") + b"[1,2]", b"\xff" * 20])
def test_a_file_without_a_header_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} has no safetensors header that can be read"):
        read_schema(tmp_path)


def test_the_same_weights_in_another_format_beside_them_are_no_tensors_of_the_model(tmp_path: Path) -> None:
    """As Mistral's repositories have them, and those that keep the file that was sharded."""
    directory = save_tiny_llama(tmp_path, 1)
    expected = read_schema(directory)
    save_file({"layers.0.attention.wq.weight": torch.ones(1)}, directory / "consolidated.safetensors")
    assert read_schema(directory) == expected
    save_file({"old": torch.ones(1)}, directory / "old.safetensors")
    weight_map = dict.fromkeys(expected or {}, "model.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert read_schema(directory) == expected


def test_mistrals_own_format_alone_is_the_model(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert read_schema(tmp_path) == {"norm.weight": TensorSpec(dtype="float32", shape=(1,))}


def test_an_index_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json is not an index that can be read"):
        read_schema(tmp_path)


def test_a_directory_without_weights_has_no_schema(tmp_path: Path) -> None:
    assert read_schema(tmp_path) is None


def test_what_fits_has_no_mismatch_and_floats_may_be_cast() -> None:
    assert mismatches(EXPECTED, GOOD, complete=True) == []
    assert mismatches(EXPECTED, GOOD | {"w": (torch.bfloat16, (2, 3))}, complete=True) == []
    assert mismatches(EXPECTED, {"w": GOOD["w"]}, complete=False) == []


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


def test_many_mismatches_are_counted_not_listed() -> None:
    reasons = [f"p{i}" for i in range(MAX_NAMED + 3)]
    assert join_reasons(reasons).endswith("p4; and 3 more")
    assert join_reasons(reasons[:2]) == "p0; p1"
