"""A stored version that is published: its tensors are those of its manifest."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deployments.weights.store.checkpoint import stated
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import MANIFEST, Store
from tests.deployments.weights.store.test_checkpoint import TENSORS, opened, whole


def version_of(tmp_path: Path) -> Path:
    store = Store(tmp_path / "store")
    return write_version(CommittedVersion(version=3, label=None, tensors=TENSORS), store, lambda _: None)


def rotten(directory: Path, name: str) -> None:
    """One byte of this tensor is another one."""
    (part,) = [part for part in opened(directory, 1).parts if name in part.names]
    with Path(part.path).open("r+b") as file:
        file.seek(part.ranges[0][0])
        byte = file.read(1)[0]
        file.seek(part.ranges[0][0])
        file.write(bytes([byte ^ 1]))


def test_a_stored_version_has_the_digests_that_its_manifest_states(tmp_path: Path) -> None:
    checkpoint = opened(version_of(tmp_path))
    assert checkpoint.written is not None and checkpoint.written.version == 3
    for part in checkpoint.parts:
        assert stated(part, checkpoint.written) == stated(part)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_is_not_the_one_that_was_written_is_named(tmp_path: Path, name: str) -> None:
    directory = version_of(tmp_path)
    rotten(directory, name)
    checkpoint = opened(directory)
    with pytest.raises(
        ValueError, match=f"^version 3 in {directory} is damaged: '{name}' was written with digest .* and has"
    ):
        [stated(part, checkpoint.written) for part in checkpoint.parts]


def test_tensors_that_a_manifest_does_not_name_or_that_are_gone_are_named(tmp_path: Path) -> None:
    directory = version_of(tmp_path)
    tensors = {name: TENSORS[name] for name in TENSORS if name != "odd"}
    save_file({**tensors, "more": torch.ones(2)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="is damaged: 'more' is not in its manifest"):
        opened(directory)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match="is damaged: 'odd' was written and is gone"):
        opened(directory)


def test_another_programs_file_of_that_name_states_nothing(tmp_path: Path) -> None:
    directory = whole(tmp_path / "model")
    assert opened(directory).written is None
    (directory / MANIFEST).write_text('{"version": "1.2", "files": []}')
    assert opened(directory).written is None
    (directory / MANIFEST).unlink()
    os.mkfifo(directory / MANIFEST)  # would wait for a writer
    assert opened(directory).written is None
