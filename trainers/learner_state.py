"""What a restarted learner needs beside its published weights: AdamW's moments, and master weights.

Master weights are the tensors that publishing rounds (float32 published as bfloat16): an update smaller than
the rounding exists in them alone.

Two forms of it. By parameter's name (`named_moments`, `named_weights`), sharded as the model is, for
`torch.distributed.checkpoint`, which restores it on any number of ranks. And plain tensors by parameter's
index, of one rank alone, for an adapter. Settings (learning rate, betas, weight decay) are in neither: a
restarted learner has those it was configured with.
"""

from collections.abc import Collection, Mapping

import torch
from torch.distributed.tensor import DTensor

from trainers.optimizer import STEPS, as_plain, zero_moments
from trainers.policy import Policy

Moments = Mapping[int, Mapping[str, torch.Tensor]]  # by index of the parameter, then AdamW's names


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
            if name != STEPS and list(_shard(tensor).shape) != expected:
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
            if name == STEPS
            else _copy_like(parameters[index], tensor)
            for name, tensor in tensors.items()
        }


NamedMoments = dict[str, dict[str, torch.Tensor]]  # by AdamW's name, then the parameter's


def named_moments(policy: Policy, state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]) -> NamedMoments:
    """AdamW's moments of all weights, those of 8 bit as plain tensors; nothing is copied.

    Args:
        state: of the optimizer.
    """
    moments: NamedMoments = {}
    for name, parameter in policy.model.named_parameters():
        for kind, tensor in state.get(parameter, {}).items():
            for plain, each in as_plain(kind, tensor).items():
                moments.setdefault(plain, {})[name] = each
    return moments


def empty_moments(
    policy: Policy, optimizer: torch.optim.Optimizer, names: Collection[str]
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """A state of the optimizer to restore moments into.

    Args:
        names: of the parameters that have moments.
    """
    return {
        parameter: zero_moments(optimizer, parameter)
        for name, parameter in policy.model.named_parameters()
        if name in names
    }


def named_weights(policy: Policy, wire_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """As `master_weights`, sharded as the model is."""
    rounded = master_weights(policy, wire_dtype)
    return {name: tensor.detach() for name, tensor in policy.trained().items() if name in rounded}


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
