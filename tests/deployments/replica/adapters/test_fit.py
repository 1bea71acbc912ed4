"""Which adapter files are refused, and which are not there yet."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.replica.adapters.check import check_adapter
from deployments.weights.store.adapter_store import Incomplete
from deployments.weights.store.hub import read_schema
from tests.deployments.replica.adapters.fake_llm import CONFIG, FIRST, adapter, changed
from tests.tiny_adapters import save_tiny_adapter, tiny_adapter_tensors


def test_adapter_of_the_base_model_fits(tmp_path: Path, model: str) -> None:
    check_adapter(adapter(save_tiny_adapter(tmp_path / "a", 1)), read_schema(Path(model)), CONFIG)


@pytest.mark.parametrize(
    ("tensors", "phrase"),
    [
        (tiny_adapter_tensors(1, width=256), "another base model"),
        (tiny_adapter_tensors(1, layers=3), "layers.2.self_attn.q_proj' is no module of the base model"),
        (tiny_adapter_tensors(1, rank=16), "rank 16, expected at most max_lora_rank, 8"),
        (changed(**{f"{FIRST}.lora_B.weight": None}), "has lora_A alone"),
        (changed(**{f"{FIRST}.lora_B.weight": torch.zeros(128, 5)}), "have the shapes"),
        (changed(**{f"{FIRST}.lora_B.weight": torch.full((128, 4), torch.nan)}), "NaN or an infinity"),
    ],
)
def test_misfit_is_named(tmp_path: Path, model: str, tensors: dict[str, torch.Tensor], phrase: str) -> None:
    directory = save_tiny_adapter(tmp_path / "a", 1, tensors=tensors)
    with pytest.raises(ValueError, match=phrase) as raised:
        check_adapter(adapter(directory), read_schema(Path(model)), CONFIG)
    assert not isinstance(raised.value, Incomplete)


@pytest.mark.parametrize(
    ("config", "phrase"),
    [({"r": 16}, "max_lora_rank"), ({"use_dora": True}, "(?i)dora"), ({"bias": "all"}, "bias")],
)
def test_unsupported_adapter_config_is_refused(
    tmp_path: Path, model: str, config: dict[str, Any], phrase: str
) -> None:
    with pytest.raises(ValueError, match=phrase):
        check_adapter(
            adapter(save_tiny_adapter(tmp_path / "a", 1, **config)), read_schema(Path(model)), CONFIG
        )


def test_adapter_with_another_digest_is_not_loaded(tmp_path: Path, model: str) -> None:
    expected = adapter(save_tiny_adapter(tmp_path / "a", 1))
    save_tiny_adapter(tmp_path / "a", 2)
    with pytest.raises(Incomplete, match="digest"):
        check_adapter(expected, read_schema(Path(model)), CONFIG)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("length", [0, 5, 20, -10])
def test_truncated_file_is_incomplete(tmp_path: Path, model: str, name: str, length: int) -> None:
    expected = adapter(directory := save_tiny_adapter(tmp_path / "a", 1))
    (directory / name).write_bytes((directory / name).read_bytes()[:length])
    with pytest.raises(Incomplete):
        check_adapter(expected, read_schema(Path(model)), CONFIG)
