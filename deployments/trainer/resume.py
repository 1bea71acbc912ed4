"""Where a trainer of all weights goes on after a restart: from its weights, those of a stored version.

    a checkpoint of that step, and of these weights   exactly where it was
    one of another step, or of other weights          weights as stored, moments of the checkpoint
    none that can be used                             weights as stored, moments from zero

Of several the one whose step is nearest is taken, and if it is damaged the next.
"""

from pathlib import Path
from typing import TypeVar

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
    named_weights,
    restore_weights,
    round_to_model,
    set_moments,
)
from trainers.policy import DTYPES

WEIGHTS = "weights"
T = TypeVar("T")


def resume(learner: Learner, checkpoints: Checkpoints, step: int, fleet_id: str | None) -> str | None:
    """Continue from the learner's weights with what is in the nearest checkpoint. Called on every rank.

    Args:
        step: optimizer steps that the weights have had.

    Returns:
        None if the learner is exactly what it was after that step. Else in what it differs, for the log.
    """
    found = checkpoints.complete(fleet_id)
    problems = []
    for path, about in sorted(found, key=lambda each: (abs(each[1].step - step), each[1].step)):
        own = _look(learner, path, about)
        agreed = _all_ranks(own if isinstance(own, str) else None)
        if (problem := next((each for each in agreed if each is not None), None)) is not None:
            problems.append(problem)
            continue
        assert not isinstance(own, str)
        problem = _read(learner, checkpoints, path, about, own, at_step=about.step == step)
        if problem in (None, _OTHER_WEIGHTS):
            learner.restart(step, keep_moments=True)
            checkpoints.step = about.step
            return problem and f"weights as stored, moments of step {about.step}"
        problems.append(problem)
    learner.restart(step, keep_moments=False)
    reason = "; ".join(problems) or f"there is no checkpoint in {checkpoints.directory}"
    return f"moments start at zero: {reason}"


_OTHER_WEIGHTS = "other weights"


def _look(learner: Learner, path: Path, about: About) -> Metadata | str:
    """What a checkpoint has, or why this rank cannot use it."""
    try:
        metadata: Metadata = dcp.FileSystemReader(path).read_metadata()
        shapes = {name: tensor.shape for name, tensor in learner.policy.model.named_parameters()}
        for key, stored in metadata.state_dict_metadata.items():
            kind, _, name = key.partition(".")
            if kind in (WEIGHTS, "step") or not isinstance(stored, TensorStorageMetadata):
                continue
            if shapes.get(name) != stored.size:
                expected = "no such parameter" if name not in shapes else f"shape {list(shapes[name])}"
                raise ValueError(f"{kind} of {name!r}: expected {expected}, got {list(stored.size)}")
        return metadata
    except Exception as error:  # a damaged file raises anything; training goes on without it
        return f"{path} cannot be used: {one_line(error)}"


def _read(
    learner: Learner,
    checkpoints: Checkpoints,
    path: Path,
    about: About,
    metadata: Metadata,
    *,
    at_step: bool,
) -> str | None:
    """Read a checkpoint into the learner: None if its weights were restored too."""
    names: dict[str, set[str]] = {}
    for key in metadata.state_dict_metadata:
        kind, _, name = key.partition(".")
        names.setdefault(kind, set()).add(name)
    weights: dict[str, torch.Tensor] = {}
    stored = names.pop(WEIGHTS, set())
    exact = at_step
    if at_step and about.wire_dtype is not None:
        rounded = named_weights(learner.policy, DTYPES[about.wire_dtype])
        exact = rounded.keys() == stored
        weights = {name: torch.empty_like(tensor) for name, tensor in rounded.items()} if exact else {}
    try:
        moments: NamedMoments = empty_moments(learner.policy, names)
        dcp.load(
            moments | {WEIGHTS: weights},
            storage_reader=dcp.FileSystemReader(path),
            process_group=checkpoints.group,
            no_dist=checkpoints.group is None,
        )
    except ERRORS as error:  # on all ranks: torch tells each of another's
        return f"{path} cannot be used: {one_line(error)}"
    plain = {name: _local(tensor) for name, tensor in weights.items()}
    if exact and plain:
        assert about.wire_dtype is not None
        exact = round_to_model(learner.policy, plain, DTYPES[about.wire_dtype])
    set_moments(learner.policy, learner.optimizer, moments)
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
