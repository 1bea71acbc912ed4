import json
from pathlib import Path

import pytest

from deployments.weights.store.manifest import StoredTensor, VersionManifest
from deployments.weights.store.versions import Store

MANIFEST = VersionManifest(
    version=7,
    label="step-7",
    trainer_step=70,
    tensors={
        "w": StoredTensor(dtype="bfloat16", shape=(2, 3), digest="0123456789abcdef"),
        "n": StoredTensor(dtype="int64", shape=(), digest="00"),
    },
)


def test_a_manifest_is_decoded_as_it_was_encoded() -> None:
    assert VersionManifest.decode(MANIFEST.encode()) == MANIFEST


def test_fields_without_a_value_are_left_out() -> None:
    encoded = VersionManifest(
        version=7, tensors={"w": StoredTensor(dtype="int64", shape=(2,), digest="00")}
    ).encode()
    assert json.loads(encoded) == {
        "version": 7,
        "tensors": {"w": {"dtype": "int64", "shape": [2], "digest": "00"}},
    }


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


def test_a_damaged_manifest_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.writing(MANIFEST):
        pass
    (store.path_of(7) / "manifest.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"v00000007/manifest\.json: not a manifest: version: Field required"
    ):
        store.manifest_of(7)
