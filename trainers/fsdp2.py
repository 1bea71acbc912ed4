"""FSDP2: a policy's layers sharded over the ranks of a process group.

Each decoder layer is one unit (`fully_shard`), the rest is the root's: a forward or backward holds
one gathered layer at a time. Every rank must run the same sequence of forwards, backwards and
parameter reads, because each of them gathers.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainers.policy import Policy


def shard_policy(
    policy: Policy,
    *,
    device: str | None = None,
    mesh: DeviceMesh | None = None,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Shard the policy's model in place; call on every rank, before its optimizer is built.

    Args:
        device: where the shards go; by default where the model is. A model in host memory moves there
            layer by layer, so that no device ever holds a whole copy.
        mesh: one-dimensional; by default all ranks of the default process group.
        compute_dtype: of gathered parameters in forward and backward; gradients are reduced in float32.

    Raises:
        ValueError: no process group, or a model in which no stack of layers is found.
    """
    if not dist.is_initialized():
        raise ValueError("FSDP2 needs torch.distributed.init_process_group to be called first")
    model = policy.model
    target = policy.device if device is None else torch.device(device)
    if mesh is None:
        mesh = init_device_mesh(target.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers = decoder_layers(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    policy.device = target


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of every outermost `layers` list: what is sharded as one unit each."""
    layers = [
        layer
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.rpartition(".")[2] == "layers"
        for layer in module
    ]
    if not layers:
        raise ValueError(f"expected a model with a ModuleList named 'layers', got {type(model).__name__}")
    return layers
