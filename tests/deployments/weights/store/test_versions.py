import fcntl
import json
import os
from pathlib import Path

import pytest

from deployments.weights.store.versions import MANIFEST, Store, StoredTensor, VersionManifest, mtp_names


def manifest_of(version: int) -> VersionManifest:
    return VersionManifest(version=version, tensors={})


def write(store: Store, version: int) -> None:
    with store.writing(version) as directory:
        (directory / MANIFEST).write_text(manifest_of(version).encode())
        (directory / "config.json").write_text("{}")
        (directory / "sub").mkdir()
        (directory / "sub" / "weights.bin").write_bytes(b"x" * version)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_version_is_listed_once_it_is_complete(store: Store) -> None:
    assert list(store.list()) == []
    with store.writing(3) as directory:
        (directory / "config.json").write_text("{}")
        assert list(store.list()) == []
    assert list(store.list()) == [3]
    assert store.path_of(3).name == "v00000003"


def test_a_writer_that_fails_leaves_nothing(store: Store) -> None:
    write(store, 1)
    with pytest.raises(RuntimeError, match="disk on fire"), store.writing(2):
        raise RuntimeError("disk on fire")
    assert list(store.list()) == [1]
    assert [entry.name for entry in store.directory.iterdir()] == ["v00000001"]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_two_writers_of_a_version_share_nothing(store: Store, first_ends_first: bool) -> None:
    """The first was believed lost."""
    writers = [store.writing(1) for _ in range(2)]
    directories = [writer.__enter__() for writer in writers]
    order = [0, 1] if first_ends_first else [1, 0]
    (directories[order[0]] / "weights.bin").write_bytes(b"whole")
    if directories[order[1]].exists():
        (directories[order[1]] / "weights.bin").write_bytes(b"ha")
    writers[order[0]].__exit__(None, None, None)
    assert list(store.list()) == [1]
    assert (store.path_of(1) / "weights.bin").read_bytes() == b"whole"
    with pytest.raises(FileExistsError, match="version 1 is in"):
        writers[order[1]].__exit__(None, None, None)
    assert (store.path_of(1) / "weights.bin").read_bytes() == b"whole"
    assert [entry.name for entry in store.directory.iterdir()] == ["v00000001"]


@pytest.mark.parametrize("older_ends_first", [True, False])
def test_a_writer_leaves_a_newer_version_to_its_writer(store: Store, older_ends_first: bool) -> None:
    older, newer = store.writing(12), store.writing(13)
    older.__enter__()
    (newer.__enter__() / "weights.bin").write_bytes(b"whole")
    if older_ends_first:
        older.__exit__(None, None, None)
        newer.__exit__(None, None, None)
    else:
        newer.__exit__(None, None, None)
        with pytest.raises(FileNotFoundError):  # nobody needs it any more
            older.__exit__(None, None, None)
    assert list(store.list()) == ([12, 13] if older_ends_first else [13])
    assert (store.path_of(13) / "weights.bin").read_bytes() == b"whole"
    assert not list(store.directory.glob(".*"))


def test_what_a_crashed_writer_left_is_removed_by_the_next(store: Store) -> None:
    (store.directory / ".v00000001.partial").mkdir(parents=True)  # half removed
    (store.directory / ".v00000001.0a1b2c3d.partial").mkdir()
    write(store, 2)
    assert [entry.name for entry in store.directory.iterdir()] == ["v00000002"]


def test_a_version_that_is_being_read_is_not_removed(store: Store) -> None:
    write(store, 1)
    write(store, 2)
    with store.reading(1) as path:
        assert not store.remove(1)
        assert list(store.list()) == [1, 2]
        assert (path / "config.json").exists()
    assert store.remove(1)
    assert [entry.name for entry in store.directory.iterdir()] == ["v00000002"]


def test_version_is_never_written_twice(store: Store) -> None:
    for version in (1, 2, 10):
        write(store, version)
    with pytest.raises(FileExistsError, match="version 1 is in"):
        write(store, 1)
    assert store.manifest_of(1) == manifest_of(1) and list(store.list()) == [1, 2, 10]
    with pytest.raises(FileNotFoundError):
        store.remove(3)


def test_an_absent_version_is_an_error_that_names_the_stored_ones(store: Store) -> None:
    write(store, 5)
    absent = r"version 4 is not in .* expected one of \[5\]"
    with pytest.raises(FileNotFoundError, match=absent):
        store.path_of(4)
    with pytest.raises(FileNotFoundError, match=absent):
        store.manifest_of(4)
    with pytest.raises(FileNotFoundError, match=absent), store.reading(4):
        pass


def test_version_that_is_being_removed_cannot_be_read(store: Store) -> None:
    write(store, 1)
    descriptor = os.open(store.path_of(1), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(FileNotFoundError, match="is being removed"), store.reading(1):
            pass
    finally:
        os.close(descriptor)
    with store.reading(1) as path:
        assert path.exists()


# -- manifests -------------------------------------------------------------------------------------


CONTENT = VersionManifest(
    version=7,
    label="step-7",
    trainer_step=70,
    tensors={
        "w": StoredTensor(dtype="bfloat16", shape=(2, 3), digest="0123456789abcdef"),
        "n": StoredTensor(dtype="int64", shape=(), digest="00"),
    },
)


def test_manifest_round_trip_omits_fields_without_a_value() -> None:
    assert VersionManifest.decode(CONTENT.encode()) == CONTENT
    assert json.loads(CONTENT.encode()).keys() == {"version", "label", "trainer_step", "tensors"}


def test_fields_of_a_newer_release_are_ignored() -> None:
    newer = json.loads(CONTENT.encode()) | {"shards": 2}
    newer["tensors"]["w"]["compression"] = "none"
    assert VersionManifest.decode(json.dumps(newer)) == CONTENT


def test_a_damaged_manifest_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.writing(7) as directory:
        (directory / MANIFEST).write_text("{}")
    with pytest.raises(
        ValueError, match=r"v00000007/manifest\.json: not a manifest: version: Field required"
    ):
        store.manifest_of(7)


def test_multi_token_prediction_is_told_by_its_name_or_by_a_layer_beyond_the_last() -> None:
    drafters = {
        "mtp.fc.weight",  # Qwen3.5, Qwen3-Next
        "model.mtp_layers.0.input_proj.weight",  # MiMo
        "model.mtp_block.0.mlp.up_proj.weight",  # Ernie
        "model.layers.2.eh_proj.weight",  # GLM, DeepSeek
        "model.language_model.layers.3.enorm.weight",
    }
    policies = {
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.language_model.layers.0.mlp.up_proj.weight",
        "model.visual.blocks.7.attn.qkv.weight",
        "vision_tower.encoder.layers.7.mlp.fc1.weight",
    }
    assert mtp_names(drafters | policies, depth=2) == drafters
