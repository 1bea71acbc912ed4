"""Where a trainer of all weights goes on after a restart: from its weights, those of a stored version.

    a checkpoint of that step, and of these weights   exactly where it was
    one of another step, or of other weights          weights as stored, moments of the checkpoint
    none that can be used                             weights as stored, moments from zero

Of several the one whose step is nearest is taken, and if it is damaged the next. With an adapter whose sum
with its base was stored the first row alone counts: else the adapter begins anew (see `lora.merged`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from deployments.trainer.checkpoints import ERRORS, About, Checkpoints, one_line
from trainers.learner import Learner
from trainers.learner_state import (
    NamedMoments,
    empty_moments,
    named_moments,
    named_weights,
    restore_weights,
    round_to_model,
)
from trainers.optimizer import STEPS
from trainers.policy import DTYPES

WEIGHTS = "weights"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A checkpoint that fits, and what to read it into: `moments` has the memory of `state`."""

    weights: Collection[str]  # names of those it has
    state: dict[torch.Tensor, dict[str, torch.Tensor]]
    moments: NamedMoments


def resume(
    learner: Learner,
    checkpoints: Checkpoints,
    step: int,
    fleet_id: str | None,
    adapter: Mapping[str, Any] | None = None,
    digest: str | None = None,
) -> str | None:
    """Continue from the learner's weights with what is in the nearest checkpoint. Called on every rank.

    Args:
        step: optimizer steps that the weights have had.
        adapter: what a checkpoint says of the adapter that is trained.
        digest: of the version with the weights; None: unknown.

    Returns:
        None if the learner is exactly what it was after that step. Else in what it differs, for the log.
    """
    found = [each for each in checkpoints.complete(fleet_id) if each[1].adapter == adapter]
    if adapter is not None:
        found = [each for each in found if each[1].is_of(step, digest)]
    problems = []
    for path, about in sorted(found, key=lambda each: (abs(each[1].step - step), each[1].step)):
        own = _look(learner, path)
        agreed = _all_ranks(own if isinstance(own, str) else None)
        if (problem := next((each for each in agreed if each is not None), None)) is not None:
            problems.append(problem)
            continue
        assert not isinstance(own, str)
        problem = _read(learner, checkpoints, path, about, own, exact=about.is_of(step, digest))
        if problem in (None, _OTHER_WEIGHTS):
            learner.restart(step, keep_moments=True)
            checkpoints.step = about.step if problem is None else None  # else the next one is due
            return problem and f"weights as stored, moments of step {about.step}"
        problems.append(problem)
    learner.restart(step, keep_moments=False)
    reason = "; ".join(problems) or f"there is no checkpoint in {checkpoints.directory}"
    return f"moments start at zero: {reason}"


_OTHER_WEIGHTS = "other weights"


def _look(learner: Learner, path: Path) -> _Found | str:
    """What a checkpoint has, or why this rank cannot use it."""
    try:
        metadata: Metadata = dcp.FileSystemReader(path).read_metadata()
        stored = {
            key: list(each.size)
            for key, each in metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
        weights = {key.removeprefix(f"{WEIGHTS}.") for key in stored if key.startswith(f"{WEIGHTS}.")}
        stored = {key: shape for key, shape in stored.items() if not key.startswith(f"{WEIGHTS}.")}
        with_moments = {key.removeprefix(f"{STEPS}.") for key in stored}
        state = empty_moments(learner.policy, learner.optimizer, with_moments)
        moments = named_moments(learner.policy, state)
        _check(stored, moments)
        return _Found(weights=weights, state=state, moments=moments)
    except Exception as error:  # a damaged file raises anything; training goes on without it
        return f"{path} cannot be used: {one_line(error)}"


def _check(stored: Mapping[str, Sequence[int]], moments: NamedMoments) -> None:
    """Raises ValueError if these are not the moments of this model and this optimizer."""
    expected = {
        f"{kind}.{name}": list(tensor.shape)
        for kind, each in moments.items()
        for name, tensor in each.items()
    }
    for key in sorted(stored.keys() | expected.keys()):
        if stored.get(key) != expected.get(key):
            kind, _, name = key.partition(".")
            wanted, got = (f"shape {each[key]}" if key in each else "nothing" for each in (expected, stored))
            raise ValueError(f"{kind} of {name!r}: expected {wanted}, got {got}")


def _read(
    learner: Learner, checkpoints: Checkpoints, path: Path, about: About, found: _Found, *, exact: bool
) -> str | None:
    """Read a checkpoint into the learner: None if it is then exactly what it was.

    Args:
        exact: whether the checkpoint says that it is of the learner's weights.
    """
    weights: dict[str, torch.Tensor] = {}
    is_adapter = learner.policy.adapter is not None
    if exact and (is_adapter or about.wire_dtype is not None):
        dtype = None if about.wire_dtype is None else DTYPES[about.wire_dtype]
        rounded = named_weights(learner.policy, dtype)
        exact = rounded.keys() == found.weights
        weights = {name: torch.empty_like(tensor) for name, tensor in rounded.items()} if exact else {}
    try:
        dcp.load(
            found.moments | {WEIGHTS: weights},
            storage_reader=dcp.FileSystemReader(path),
            process_group=checkpoints.group,
            no_dist=checkpoints.group is None,
        )
    except ERRORS as error:  # on all ranks: torch tells each of another's
        return f"{path} cannot be used: {one_line(error)}"
    plain = {name: _local(tensor) for name, tensor in weights.items()}
    if exact and plain and not is_adapter:
        assert about.wire_dtype is not None
        exact = round_to_model(learner.policy, plain, DTYPES[about.wire_dtype])
    learner.optimizer.state.clear()
    learner.optimizer.state.update(found.state)
    if not all(_all_ranks(exact)):
        return _OTHER_WEIGHTS
    restore_weights(learner.policy, plain)
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _all_ranks(own: T) -> list[T]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    ranks = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks
