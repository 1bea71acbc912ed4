"""FSDP2: a policy's layers sharded over the ranks of a process group.

Each decoder layer is one unit (`fully_shard`), everything else belongs to the root unit: a forward or
backward pass has one gathered layer in memory at a time. Every rank must run the same sequence of
forwards, backwards and parameter reads, because each of them gathers. An adapter is small, and whole on every
rank: the learner averages its gradients.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainers.layers import decoder_layers
from trainers.policy import Policy


def shard_policy(
    policy: Policy,
    *,
    device: str | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    """Shard the policy's model in place; call on every rank, before its optimizer is built.

    Gathered parameters have the policy's `compute_dtype`; gradients are reduced in float32.

    Args:
        device: the device of the shards; by default the model's. A model in host memory is moved
            layer by layer, so no device ever holds a full copy.
        mesh: one-dimensional; by default all ranks of the default process group.

    Raises:
        ValueError: there is no process group, or the model has no list of layers.
    """
    if not dist.is_initialized():
        raise ValueError("FSDP2 needs torch.distributed.init_process_group to be called first")
    model = policy.model
    target = policy.device if device is None else torch.device(device)
    if mesh is None:
        mesh = init_device_mesh(target.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=policy.compute_dtype, reduce_dtype=torch.float32)
    layers = decoder_layers(model)
    whole = None
    if policy.adapter is not None:
        policy.adapter.to(target)
        whole = set(policy.adapter.parameters())
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, ignored_params=whole)
    fully_shard(model, mesh=mesh, mp_policy=precision, ignored_params=whole)
    policy.device = target
