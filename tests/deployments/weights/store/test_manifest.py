"""Manifests of stored versions: those that are written now, and those that earlier releases wrote."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deployments.weights.store.manifest import StoredTensor, VersionManifest
from deployments.weights.store.versions import Store
from deployments.weights.wire.digest import digest

GOLDEN = Path(__file__).parent / "golden" / "store-0.1"
TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}

MANIFEST = VersionManifest(
    version=7,
    label="step-7",
    trainer_step=70,
    tensors={
        "w": StoredTensor(dtype="bfloat16", shape=(2, 3), digest="0123456789abcdef"),
        "n": StoredTensor(dtype="int64", shape=()),
    },
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A copy of what release 0.1 wrote: version 1 by a trainer, version 2 by a replica."""
    return Store(shutil.copytree(GOLDEN, tmp_path / "store"))


def test_a_manifest_is_decoded_as_it_was_encoded() -> None:
    assert VersionManifest.decode(MANIFEST.encode()) == MANIFEST


def test_fields_without_a_value_are_left_out() -> None:
    encoded = VersionManifest(version=7, tensors={"w": StoredTensor(dtype="int64", shape=(2,))}).encode()
    assert json.loads(encoded) == {"version": 7, "tensors": {"w": {"dtype": "int64", "shape": [2]}}}


def test_fields_of_a_newer_release_are_ignored() -> None:
    newer = json.loads(MANIFEST.encode()) | {"shards": 2}
    newer["tensors"]["w"]["compression"] = "none"
    assert VersionManifest.decode(json.dumps(newer)) == MANIFEST


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"tensors": {}}', "not a manifest: version: Field required"),
        ('{"version": 1}', "not a manifest: tensors: Field required"),
        ('{"version": "new", "tensors": {}}', "not a manifest: version: .*valid integer.* got 'new'"),
        ('{"version": 1, "tensors": {"w": {"dtype": "int8"}}}', r"tensors\.w\.shape: Field required"),
        ("{", "not a manifest: text: Invalid JSON"),
    ],
)
def test_text_that_is_no_manifest_is_refused_by_its_first_wrong_field(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VersionManifest.decode(text)


def test_a_damaged_manifest_is_an_error_that_names_the_file(store: Store) -> None:
    (store.path_of(2) / "manifest.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"v00000002/manifest\.json: not a manifest: version: Field required"
    ):
        store.manifest_of(2)


def test_a_store_of_release_0_1_is_listed(store: Store) -> None:
    assert list(store.list()) == [1, 2]


def test_a_trainers_manifest_of_release_0_1_is_read(store: Store) -> None:
    assert store.manifest_of(1) == VersionManifest(
        version=1,
        label="step-1",
        trainer_step=7,
        tensors={
            "a": StoredTensor(dtype="float32", shape=(2, 3)),
            "b": StoredTensor(dtype="bfloat16", shape=(3,)),
        },
    )


def test_a_replicas_manifest_of_release_0_1_is_read(store: Store) -> None:
    manifest = store.manifest_of(2)
    assert (manifest.version, manifest.label, manifest.trainer_step) == (2, None, None)
    assert manifest.tensors == {
        "a": StoredTensor(dtype="float32", shape=(2, 3), digest="3578058cfaa00018"),
        "b": StoredTensor(dtype="bfloat16", shape=(3,), digest="5e1b7cd51b9cce06"),
    }


@pytest.mark.parametrize("version", [1, 2])
def test_weights_of_release_0_1_are_loaded(store: Store, version: int) -> None:
    with store.reading(version) as directory:
        loaded = load_file(directory / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert loaded[name].dtype == expected.dtype and torch.equal(loaded[name], expected)


def test_digests_of_release_0_1_are_still_the_digests_of_its_weights(store: Store) -> None:
    loaded = load_file(store.path_of(2) / "model.safetensors")
    stated = {name: tensor.digest for name, tensor in store.manifest_of(2).tensors.items()}
    assert {name: f"{digest(tensor):016x}" for name, tensor in loaded.items()} == stated
