"""What a restart needs beside published weights: AdamW's moments, and master weights, which publishing
rounds. By parameter name, sharded as the model."""

from collections.abc import Collection, Mapping

import torch
from torch.distributed.tensor import DTensor

from trainers.trained_policy import TrainedPolicy

STEPS = "step"  # AdamW's count of updates
NamedMoments = dict[str, dict[str, torch.Tensor]]  # moment -> parameter -> tensor


def named_moments(
    policy: TrainedPolicy, state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
) -> NamedMoments:
    """Not copied."""
    moments: NamedMoments = {}
    for name, parameter in policy.named_parameters():
        for kind, tensor in state.get(parameter, {}).items():
            moments.setdefault(kind, {})[name] = tensor
    return moments


@torch.no_grad()
def empty_moments(
    policy: TrainedPolicy, names: Collection[str]
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    return {
        parameter: {
            STEPS: torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        for name, parameter in policy.named_parameters()
        if name in names
    }


def master_weights(policy: TrainedPolicy, wire_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Tensors that a cast to `wire_dtype` may change, and all of an adapter, which the store lacks. Not
    copied."""
    return {
        name: tensor.detach()
        for name, tensor in policy.trained().items()
        if policy.adapter is not None
        or (
            wire_dtype is not None
            and tensor.is_floating_point()
            and torch.promote_types(tensor.dtype, wire_dtype) != wire_dtype
        )
    }


def round_to_model(
    policy: TrainedPolicy, weights: Mapping[str, torch.Tensor], wire_dtype: torch.dtype
) -> bool:
    """Whether these weights (this rank's shards) round to the model's."""
    own = {name: local(tensor) for name, tensor in policy.trained().items()}
    return all(
        name in own
        and own[name].shape == weight.shape
        and torch.equal(weight.to(own[name].device).to(wire_dtype).to(own[name].dtype), own[name])
        for name, weight in weights.items()
    )


@torch.no_grad()
def restore_weights(policy: TrainedPolicy, weights: Mapping[str, torch.Tensor]) -> None:
    own = policy.trained()
    for name, weight in weights.items():
        local(own[name]).copy_(weight)


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
