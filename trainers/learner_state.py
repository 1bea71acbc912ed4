"""What a restarted learner needs beside its published weights: AdamW's moments, and master weights.

Master weights are the tensors that publishing rounds (float32 published as bfloat16): an update smaller than
the rounding exists in them alone.

All tensors of a state are plain. Under FSDP2 they are this rank's shards, and each rank restores its own.
Settings (learning rate, betas, weight decay) are no part of it: a restarted learner has those it was
configured with.
"""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from trainers.policy import Policy

Moments = Mapping[int, Mapping[str, torch.Tensor]]  # by index of the parameter, then AdamW's names
_STEPS = "step"  # AdamW's count of a parameter's updates; all other tensors have the parameter's shape


def moments_of(optimizer: torch.optim.Optimizer) -> Moments:
    """AdamW's moments; nothing is copied."""
    return {
        index: {name: _shard(tensor) for name, tensor in moments.items()}
        for index, moments in optimizer.state_dict()["state"].items()
    }


def check_moments(optimizer: torch.optim.Optimizer, moments: Moments) -> None:
    """Check that `restore_moments` can restore them.

    Raises:
        ValueError: they belong to other parameters, or to other shards of them.
    """
    parameters = _parameters(optimizer)
    for index, tensors in moments.items():
        if not 0 <= index < len(parameters):
            raise ValueError(f"moments of parameter {index}, expected {len(parameters)} parameters")
        expected = list(_shard(parameters[index]).shape)
        for name, tensor in tensors.items():
            if name != _STEPS and list(_shard(tensor).shape) != expected:
                raise ValueError(
                    f"{name!r} of parameter {index} must have shape {expected}, got {list(tensor.shape)}"
                )


@torch.no_grad()
def restore_moments(optimizer: torch.optim.Optimizer, moments: Moments) -> None:
    """Replace the optimizer's moments by copies of what `moments_of` returned on the same rank.

    Raises:
        ValueError: see `check_moments`; nothing has been changed then.
    """
    check_moments(optimizer, moments)
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for index, tensors in moments.items():
        optimizer.state[parameters[index]] = {
            name: tensor.to(parameters[index].device, copy=True)
            if name == _STEPS
            else _copy_like(parameters[index], tensor)
            for name, tensor in tensors.items()
        }


def master_weights(policy: Policy, wire_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The tensors that a cast to `wire_dtype` (None: no cast) may change; of an adapter all, because the
    store has no version of it to resume from. Nothing is copied."""
    own = shards(policy)
    if policy.adapter is not None:
        return own
    if wire_dtype is None:
        return {}
    return {
        name: tensor
        for name, tensor in own.items()
        if tensor.is_floating_point() and torch.promote_types(tensor.dtype, wire_dtype) != wire_dtype
    }


def round_to_model(policy: Policy, weights: Mapping[str, torch.Tensor], wire_dtype: torch.dtype) -> bool:
    """Whether the model has exactly these weights, rounded to `wire_dtype`."""
    own = shards(policy)
    return all(
        name in own
        and own[name].shape == weight.shape
        and torch.equal(weight.to(own[name].device).to(wire_dtype).to(own[name].dtype), own[name])
        for name, weight in weights.items()
    )


@torch.no_grad()
def restore_weights(policy: Policy, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy what `master_weights` returned on the same rank into the model, in place."""
    own = shards(policy)
    for name, weight in weights.items():
        own[name].copy_(weight)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shards(policy: Policy) -> dict[str, torch.Tensor]:
    """This rank's part of what is trained, by name; the model's own memory."""
    return {name: _shard(tensor) for name, tensor in policy.trained().items()}


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with this content, sharded as the parameter is, and with its dtype, on its device."""
    copy = torch.empty_like(parameter)
    _shard(copy).copy_(_shard(tensor))
    return copy
