"""What is in the store is compared with what was written before anybody loads it."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.weights.store.integrity import check_files
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import Store
from deployments.weights.wire.digest import digest
from deployments.weights.wire.digest_definition import version_digest

TENSORS = {
    "w": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "strided": torch.arange(6).reshape(2, 3).t(),
    "scale": torch.tensor(2.0),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """The directory of version 3."""
    committed = CommittedVersion(version=3, label=None, tensors=TENSORS)
    return write_version(committed, Store(tmp_path / "store"), lambda directory: None)


def rewrite(directory: Path, **tensors: torch.Tensor) -> None:
    """Replace the weights, and leave the manifest."""
    save_file(tensors, directory / "model.safetensors")


def stored(directory: Path) -> dict[str, torch.Tensor]:
    loaded = load_file(directory / "model.safetensors")
    return {name: tensor.clone() for name, tensor in loaded.items()}  # not mapped while the file is replaced


def test_what_was_written_is_intact(version: Path) -> None:
    check_files(version, 3)


def test_weights_in_several_files_are_compared_too(version: Path) -> None:
    tensors = stored(version)
    save_file({"w": tensors.pop("w")}, version / "model-2.safetensors")
    rewrite(version, **tensors)
    check_files(version, 3)


def test_a_flipped_bit_is_found_and_its_tensor_named(version: Path) -> None:
    tensors = stored(version)
    tensors["b"].view(torch.uint8)[1] ^= 1
    rewrite(version, **tensors)
    message = r"^version 3 in .*v00000003 is damaged: 'b' was written with digest \w{16} and has \w{16}$"
    with pytest.raises(ValueError, match=message):
        check_files(version, 3)


def test_a_tensor_that_is_gone_or_was_added_is_named(version: Path) -> None:
    tensors = stored(version)
    tensors["added"] = tensors.pop("w")
    rewrite(version, **tensors)
    with pytest.raises(ValueError, match=r"'added' is not in its manifest; 'w' was written .* has no bytes"):
        check_files(version, 3)


def test_a_file_that_was_cut_off_is_named(version: Path) -> None:
    file = version / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        check_files(version, 3)


def test_another_version_under_this_number_is_refused(version: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(version, tmp_path / "store" / "v00000004")
    with pytest.raises(ValueError, match=r"v00000004 must hold version 4, and its manifest says 3"):
        check_files(copied, 4)


def test_another_fleets_version_of_the_same_number_is_refused(tmp_path: Path) -> None:
    committed = CommittedVersion(version=1, label=None, fleet_id="a", tensors={"w": torch.ones(2)})
    path = write_version(committed, Store(tmp_path / "store"), lambda directory: None)
    check_files(path, 1, "a")
    with pytest.raises(ValueError, match="must hold version 1 of fleet b, and its manifest names fleet a"):
        check_files(path, 1, "b")


def test_a_version_that_is_not_as_it_was_committed_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    committed = CommittedVersion(version=1, label=None, fleet_id="a", tensors={"w": torch.ones(2)})
    path = write_version(committed, store, lambda directory: None)
    written = store.manifest_of(1).digest
    assert written == version_digest(["w"], [digest(torch.ones(2))])
    check_files(path, 1, "a", written)
    with pytest.raises(ValueError, match=f"as it was committed, with digest 00ff, and .* states {written}"):
        check_files(path, 1, "a", "00ff")


def test_what_was_not_committed_is_not_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    other = CommittedVersion(version=1, label=None, digest="00ff", tensors={"w": torch.ones(2)})
    with pytest.raises(ValueError, match="version 1 was committed with digest 00ff, and what is to be"):
        write_version(other, store, lambda directory: None)
    assert list(store.list()) == []


def test_another_fleets_version_in_the_way_is_no_success(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for fleet_id, problem in (("a", None), ("b", "of fleet a, and this is fleet b")):
        committed = CommittedVersion(version=1, label=None, fleet_id=fleet_id, tensors={"w": torch.ones(2)})
        if problem is None:
            write_version(committed, store, lambda directory: None)
        else:
            with pytest.raises(ValueError, match=problem):
                write_version(committed, store, lambda directory: None)
