from dataclasses import replace

import pytest
import torch

from deployments.weights.staging.staged_update import ChunkFindings, StagedUpdate
from deployments.weights.wire.digest import digest, digest_tensor, digests, inspect
from deployments.weights.wire.digest_definition import version_digest

TENSORS = {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.zeros(0, 4)}


def findings_of(names: str, sent: torch.Tensor | None = None, **changed: torch.Tensor) -> ChunkFindings:
    """One chunk of these tensors. `sent`: their digests as stated; `changed`: what arrived instead."""
    tensors = [TENSORS[name] for name in names]
    return ChunkFindings(
        names=list(names),
        sent=digest_tensor(tensors) if sent is None else sent,
        found=inspect([changed.get(name, TENSORS[name]) for name in names]),
    )


def test_the_digest_of_a_version_does_not_depend_on_its_chunks() -> None:
    update = StagedUpdate()
    update.pending = [findings_of("ab"), findings_of("c")]
    update.compare_digests()
    other = StagedUpdate()
    for names in "cab":
        other.pending.append(findings_of(names))
        other.compare_digests()
    assert update.state.digest == ""
    update.complete()
    other.complete()
    expected = version_digest(list(TENSORS), digests(list(TENSORS.values())))
    assert update.state.digest == other.state.digest == expected


def test_a_corrupted_tensor_is_named_with_both_digests() -> None:
    changed = TENSORS["a"].clone()
    changed[5] = -1.0
    update = StagedUpdate(pending=[findings_of("b"), findings_of("ac", a=changed)])
    message = (
        f"^'a' was sent with digest {digest(TENSORS['a']):016x} and arrived with {digest(changed):016x}$"
    )
    with pytest.raises(ValueError, match=message):
        update.compare_digests()
    assert update.names == [] and not update.state.digest


def test_a_tensor_that_is_not_finite_is_named() -> None:
    bad = torch.tensor([0.0, float("inf")])
    update = StagedUpdate(pending=[findings_of("a", sent=digest_tensor([bad]), a=bad)])
    with pytest.raises(ValueError, match=r"^'a' holds NaN or infinity$"):
        update.compare_digests()


def test_a_tensor_arrives_once() -> None:
    update = StagedUpdate()
    update.offer({"a": (torch.float32, (6,)), "b": (torch.bfloat16, (3,))})
    update.offer({"c": (torch.float32, (0, 4))})
    with pytest.raises(
        ValueError, match=r"^'a' came twice in this round; is another publisher sending too\?$"
    ):
        update.offer({"a": (torch.float32, (6,))})
    assert update.offered.keys() == {"a", "b", "c"}


def test_a_publisher_that_states_no_digests_leaves_all_other_checks() -> None:
    update = StagedUpdate(
        pending=[replace(findings_of("ab"), sent=None), replace(findings_of("c"), sent=None)]
    )
    update.compare_digests()
    assert update.state.checks == (), "nothing is known before all has arrived"
    update.complete()
    assert update.state.digest == version_digest(list(TENSORS), digests(list(TENSORS.values())))
    everything = ("names", "shapes", "dtypes", "complete", "finite")
    assert tuple(check.value for check in update.state.checks) == everything
    bad = torch.tensor([float("nan")])
    update = StagedUpdate(pending=[replace(findings_of("a", a=bad), sent=None)])
    with pytest.raises(ValueError, match=r"^'a' holds NaN or infinity$"):
        update.compare_digests()
