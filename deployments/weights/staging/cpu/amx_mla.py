"""Attention with a latent cache (MLA) on a CPU with AMX: vLLM packs the weight of `kv_b_proj`, and drops it.

Its reload would copy the new weight into what is left, an empty tensor, and fail in the middle of the model.
"""

from collections.abc import Collection, Iterator

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod


def make_reloadable(model: torch.nn.Module) -> None:
    """Give the projections memory for a weight, which vLLM drops again as soon as it is packed.

    It is filled with NaN: what is not loaded does not look like weights.
    """
    for _, projection in _projections(model):
        shape = (projection.output_size_per_partition, projection.input_size_per_partition)
        weight = torch.full(shape, torch.nan, dtype=projection.params_dtype)
        projection.weight = torch.nn.Parameter(weight, requires_grad=False)


def not_reloadable(model: torch.nn.Module) -> list[str]:
    """The paths of the projections whose weight is quantized: their scales are dropped as well, or packed."""
    return [
        path
        for path, projection in _projections(model)
        if not isinstance(projection.quant_method, UnquantizedLinearMethod)
    ]


def lacking(model: torch.nn.Module, names: Collection[str]) -> list[str]:
    """The weights that a reload needs, as all layers are packed again, and that are not among these names.

    Args:
        names: of tensors, as in a checkpoint, which may have another prefix than the model's own.
    """
    wanted = [f"{path}.weight" for path, _ in _projections(model)]
    return [each for each in wanted if not any(name.endswith(_from_its_layer(each)) for name in names)]


def _projections(model: torch.nn.Module) -> Iterator[tuple[str, LinearBase]]:
    paths = {id(module): path for path, module in model.named_modules()}
    for module in model.modules():
        if isinstance(module, MLAAttention) and module.is_amx_bmm_enabled:
            yield paths[id(module.kv_b_proj)], module.kv_b_proj


def _from_its_layer(name: str) -> str:
    return name[max(0, name.rfind("layers.")) :]
