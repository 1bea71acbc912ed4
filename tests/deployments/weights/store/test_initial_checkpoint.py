"""What version 0 is, by what an engine would load now."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deployments.protocol.poll import InitialWeights
from deployments.weights.store.initial_checkpoint import InitialCheckpoint
from tests.fake_hub import FakeHub

HERE, THERE = "a" * 40, "b" * 40


def write(directory: Path, value: float, shards: int = 2) -> None:
    for number in range(shards):
        save_file({f"w{number}": torch.full((300,), value)}, directory / f"model-{number}.safetensors")


def digest_of(directory: Path) -> InitialWeights:
    found = InitialCheckpoint(str(directory)).check(None)
    assert found is not None and found.digest is not None
    return found


def test_every_byte_and_every_name_counts(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    first, file = digest_of(tmp_path), tmp_path / "model-1.safetensors"
    assert digest_of(tmp_path) == first
    content = bytearray(file.read_bytes())
    for position in (8, len(content) - 1):  # in the header, in the last tensor
        content[position] ^= 1
        file.write_bytes(content)
        assert digest_of(tmp_path) != first
        content[position] ^= 1
    file.write_bytes(content)
    assert digest_of(tmp_path) == first
    file.rename(tmp_path / "model-2.safetensors")
    assert digest_of(tmp_path) != first


def test_files_beside_the_weights_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    first = digest_of(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not loaded")
    assert digest_of(tmp_path) == first


def test_other_formats_count_where_they_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"one")
    first = digest_of(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"two")
    assert digest_of(tmp_path) != first


def test_other_weights_are_refused_with_both_digests_until_they_are_restored(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    first = digest_of(tmp_path)
    write(tmp_path, 2.0)
    other = digest_of(tmp_path)
    initial = InitialCheckpoint(str(tmp_path))
    with pytest.raises(ValueError) as refused:
        initial.check(first)
    sentence = f"version 0 of this fleet is {first}, and {tmp_path} has {other} here: restore it, or move "
    assert str(refused.value).startswith(sentence)
    write(tmp_path, 1.0)
    assert initial.check(first) == first


def test_a_directory_that_is_rewritten_while_the_engine_loads_it_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    initial = InitialCheckpoint(str(tmp_path))
    initial.check(None)
    assert initial.changed() is None
    file = tmp_path / "model-1.safetensors"
    before = file.stat()
    save_file({"w1": torch.full((300,), 1.0)}, tmp_path / "aside")
    os.utime(tmp_path / "aside", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "aside").rename(file)
    assert initial.changed() == f"{file} was changed while it was loaded"
    initial.check(None)
    assert initial.changed() is None
    save_file({"w2": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    assert initial.changed() is not None


def test_weights_that_the_engine_makes_up_are_not_identified(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    assert InitialCheckpoint(str(tmp_path), has_files=False).check(None) is None
    assert InitialCheckpoint("s3://bucket/model").check(None) is None
    (tmp_path / "empty").mkdir()
    assert InitialCheckpoint(str(tmp_path / "empty")).check(None) is None


def test_a_hub_id_is_the_commit_that_the_fleet_began_with(hub: FakeHub) -> None:
    hub.commits["org/tiny"] = HERE
    initial = InitialCheckpoint("org/tiny")
    first = initial.check(None)
    assert first == InitialWeights(commit=HERE)
    hub.commits["org/tiny"] = THERE  # the branch moves
    assert initial.check(None) == InitialWeights(commit=THERE)
    assert initial.check(first) == first
    with pytest.raises(ValueError, match=f"is commit {HERE}, and org/tiny has commit {THERE} here"):
        InitialCheckpoint("org/tiny", "v2").check(first)  # the operator asks for another revision


def test_a_host_without_the_hub_refuses_a_commit_that_it_does_not_have(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.commits["org/tiny"] = THERE
    first = InitialWeights(commit=HERE)
    with pytest.raises(ValueError, match=f"is commit {HERE}, and org/tiny has commit {THERE} here"):
        InitialCheckpoint("org/tiny").check(first)
    hub.repositories["org/tiny"] = tmp_path
    assert InitialCheckpoint("org/tiny").check(first) == first
