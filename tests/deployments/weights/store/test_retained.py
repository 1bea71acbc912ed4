"""What a replica keeps and writes for the store: read back with safetensors and transformers."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.weights.store.retained import Keeper
from deployments.weights.store.safetensors_file import write_safetensors
from deployments.weights.store.versions import Store
from deployments.weights.wire.digest import digests
from tests.tiny_models import save_tiny_llama, tiny_llama

Tensors = dict[str, torch.Tensor]


def tensors_of(seed: int) -> Tensors:
    return {name: parameter.detach() for name, parameter in tiny_llama(seed).named_parameters()}


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    return Keeper(str(save_tiny_llama(tmp_path / "model", seed=1)))


def keep(keeper: Keeper, version: int, tensors: Tensors) -> None:
    keeper.begin()
    keeper.expect(version)
    for pair in tensors.items():
        keeper.add([pair])
    keeper.found(dict(zip(tensors, digests(list(tensors.values())), strict=True)))
    keeper.commit()


def written(keeper: Keeper, version: int, timeout_s: float = 20.0) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while (state := keeper.state()) is None or state["version"] != version:
        assert time.monotonic() < deadline, f"version {version} was not written: {state}"
        time.sleep(0.01)
    return state


def test_a_kept_version_becomes_a_checkpoint_that_transformers_loads(keeper: Keeper, tmp_path: Path) -> None:
    keep(keeper, 3, tensors_of(7))
    keeper.write(3, "step-3", str(tmp_path / "store"), 2)
    state = written(keeper, 3)
    assert (state["problem"], state["label"]) == ("", "step-3")
    store = Store(tmp_path / "store")
    assert list(store.list()) == [3] and state["path"] == str(store.path_of(3))
    loaded = AutoModelForCausalLM.from_pretrained(state["path"])
    for name, tensor in tensors_of(7).items():
        assert torch.equal(loaded.get_parameter(name), tensor)
    assert AutoTokenizer.from_pretrained(state["path"]).decode([5, 6])
    manifest = json.loads((Path(state["path"]) / "manifest.json").read_text())
    assert (manifest["version"], manifest["label"]) == (3, "step-3")
    assert manifest["tensors"]["model.norm.weight"]["shape"] == [128]
    assert len(manifest["tensors"]["model.norm.weight"]["digest"]) == 16


def test_what_was_not_committed_is_not_kept(keeper: Keeper, tmp_path: Path) -> None:
    keep(keeper, 3, tensors_of(7))
    keeper.begin()
    keeper.expect(4)
    keeper.add(list(tensors_of(8).items()))
    keeper.begin()  # the round was dropped
    with pytest.raises(ValueError, match="version 4 is to be stored, and what is kept here is 3"):
        keeper.write(4, None, str(tmp_path / "store"), 2)


def test_a_forgotten_version_cannot_be_written(keeper: Keeper, tmp_path: Path) -> None:
    keep(keeper, 3, tensors_of(7))
    keeper.forget(2)
    keeper.forget(3)
    with pytest.raises(ValueError, match="what is kept here is None"):
        keeper.write(3, None, str(tmp_path / "store"), 2)


def test_bytes_that_changed_after_they_arrived_are_not_stored(keeper: Keeper, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in tensors_of(7).items()}
    keep(keeper, 3, tensors)
    tensors["model.norm.weight"][5] += 1
    keeper.write(3, None, str(tmp_path / "store"), 2)
    assert (
        "1 kept tensors changed since they arrived, first 'model.norm.weight'"
        in written(keeper, 3)["problem"]
    )
    assert list(Store(tmp_path / "store").list()) == []


def test_a_version_that_waits_gives_way_to_a_newer_one(keeper: Keeper, tmp_path: Path) -> None:
    for version in range(1, 6):
        keep(keeper, version, tensors_of(version))
        keeper.write(version, None, str(tmp_path / "store"), 9)
    assert written(keeper, 5)["problem"] == ""
    kept = Store(tmp_path / "store").list()
    assert kept[-1] == 5 and len(kept) <= 5


def test_a_place_that_cannot_be_written_is_the_result(keeper: Keeper, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep(keeper, 3, tensors_of(7))
    keeper.write(3, None, str(tmp_path / "file" / "store"), 2)
    assert "NotADirectoryError" in written(keeper, 3)["problem"]


def test_every_dtype_comes_back_as_it_was(tmp_path: Path) -> None:
    numbers = torch.arange(7)
    tensors = {
        "odd.bytes": numbers.to(torch.uint8),
        "half": numbers.to(torch.bfloat16).reshape(7, 1),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "fp8": numbers.to(torch.float8_e4m3fn),
    }
    write_safetensors(tensors, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].to(torch.float32).equal(tensor.to(torch.float32))


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'q' is of torch\.complex128, which safetensors cannot hold"):
        write_safetensors({"q": torch.empty(2, dtype=torch.complex128)}, tmp_path / "x")
