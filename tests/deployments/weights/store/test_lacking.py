"""Where a stored version has the tensors from that its publisher lacks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deployments.weights.store.lacking import Lacking
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def write(store: Store, version: int, value: float, fleet_id: str = "fleet") -> None:
    tensors = {"w": torch.zeros(2), "tower": torch.full((2,), value)}
    committed = CommittedVersion(version=version, label=None, tensors=tensors, fleet_id=fleet_id)
    write_version(committed, store, lambda directory: None)


def read(store: Store, version: int, since: int, base: Path = Path("/nowhere")) -> float:
    lacking = Lacking(names=["tower"], since=since, base=base)
    return float(lacking.read(version, "fleet", store)["tower"][0])


def test_they_are_the_bases_while_nobody_has_changed_them(store: Store, tmp_path: Path) -> None:
    save_file({"tower": torch.ones(2)}, tmp_path / "model.safetensors")
    assert read(store, 7, since=0, base=tmp_path) == 1.0


def test_any_version_since_they_were_changed_has_them_and_the_newest_is_taken(store: Store) -> None:
    for version, value in ((2, 2.0), (3, 3.0), (4, 3.0), (6, 6.0)):
        write(store, version, value)
    assert read(store, 5, since=3) == 3.0, "neither an older one, nor one that came after"
    assert read(store, 4, since=3) == 3.0
    assert read(store, 3, since=0) == 2.0, "a host without the base"


def test_without_one_of_these_versions_they_are_nowhere(store: Store) -> None:
    write(store, 2, 2.0)
    write(store, 4, 4.0, fleet_id="other")
    message = r"lacks 1 of its tensors, first 'tower'; they are those of versions 3 to 4, none of which is in"
    with pytest.raises(ValueError, match=message):
        read(store, 5, since=3)


def test_for_a_checkpoint_of_now_the_newest_stored_version_is_taken(store: Store, tmp_path: Path) -> None:
    save_file({"tower": torch.ones(2)}, tmp_path / "model.safetensors")

    def newest(since: int) -> float:
        lacking = Lacking(names=["tower"], since=since, base=tmp_path)
        return float(lacking.newest("fleet", store)["tower"][0])

    assert newest(since=0) == 1.0
    write(store, 9, 9.0, fleet_id="other")
    assert newest(since=0) == 1.0
    with pytest.raises(ValueError, match=r"'tower'; they are those of version 3, and neither that nor"):
        newest(since=3)
    for version, value in ((2, 2.0), (4, 4.0)):
        write(store, version, value)
    assert (newest(since=0), newest(since=3)) == (4.0, 4.0)
    assert Lacking(since=5).newest("fleet", store) == {}


def test_a_damaged_tensor_gets_no_new_digest(store: Store) -> None:
    write(store, 4, 4.0)
    save_file({"w": torch.zeros(2), "tower": torch.ones(2)}, store.path_of(4) / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"version 4, from which .* is damaged: 'tower' was written with digest"
    ):
        read(store, 5, since=4)
    assert Lacking(since=4).read(5, "fleet", store) == {}
