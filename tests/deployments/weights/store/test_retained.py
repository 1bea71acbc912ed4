"""Which tensors a replica retains for the store, and for how long."""

import pytest
import torch

from deployments.weights.store.retained import RetainedVersions
from deployments.weights.wire.digest import digest


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 3), float(seed)), "n": torch.tensor([seed])}


def arrive(retained: RetainedVersions, version: int | None) -> dict[str, torch.Tensor]:
    """An update arrives; it is retained if it has a version."""
    tensors = tensors_of(7 if version is None else version)
    retained.begin()
    if version is not None:
        retained.expect(version)
    for pair in tensors.items():
        retained.add([pair])
    retained.set_digests({name: digest(tensor) for name, tensor in tensors.items()})
    return tensors


def test_a_committed_version_has_its_tensors_and_their_digests() -> None:
    retained = RetainedVersions()
    tensors = arrive(retained, 3)
    retained.commit()
    version = retained.committed(3, "step-3")
    assert (version.version, version.label, version.trainer_step) == (3, "step-3", None)
    assert version.tensors.keys() == tensors.keys()
    assert all(torch.equal(version.tensors[name], tensor) for name, tensor in tensors.items())
    assert version.expected_digests == {name: digest(tensor) for name, tensor in tensors.items()}


def test_an_update_is_retained_only_if_it_is_expected() -> None:
    retained = RetainedVersions()
    retained.begin()
    assert not retained.expecting
    retained.expect(3)
    assert retained.expecting
    retained.begin()
    assert not retained.expecting


def test_what_was_dropped_is_not_retained() -> None:
    retained = RetainedVersions()
    arrive(retained, 3)
    retained.commit()
    arrive(retained, 4)
    retained.begin()  # the round was dropped
    with pytest.raises(ValueError, match="version 4 must be retained to be stored, the retained one is 3"):
        retained.committed(4, None)
    assert retained.committed(3, None).version == 3


def test_a_newer_version_replaces_the_retained_one() -> None:
    retained = RetainedVersions()
    for version in (3, 4):
        arrive(retained, version)
        retained.commit()
    with pytest.raises(ValueError, match="version 3 must be retained to be stored, the retained one is 4"):
        retained.committed(3, None)
    assert torch.equal(retained.committed(4, None).tensors["n"], torch.tensor([4]))


def test_a_commit_that_is_not_retained_frees_the_older_version() -> None:
    retained = RetainedVersions()
    arrive(retained, 3)
    retained.commit()
    arrive(retained, None)
    retained.commit()
    with pytest.raises(ValueError, match="the retained one is None"):
        retained.committed(3, None)


def test_forgetting_a_version_frees_it_and_older_ones() -> None:
    retained = RetainedVersions()
    arrive(retained, 3)
    retained.commit()
    retained.forget(2)
    assert retained.committed(3, None).version == 3
    retained.forget(4)
    with pytest.raises(ValueError, match="the retained one is None"):
        retained.committed(3, None)
