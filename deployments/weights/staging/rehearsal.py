"""A second load of a shadow, with weights that nobody sent: shows what a round renews."""

import inspect
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.utils import process_weights_after_loading

_SEED = 4321
_LOADED: Any = 0.5  # more than nothing and less than everything: vLLM processes the layer at the end


def load_in_place(shadow: torch.nn.Module, model_config: ModelConfig, device: torch.device) -> None:
    """Load into the parameters as they are, for a model that does nothing with them afterwards."""
    for parameter in shadow.parameters():
        fill(parameter)
    process_weights_after_loading(shadow, model_config, device)


def load_by_layers(shadow: torch.nn.Module, model_config: ModelConfig) -> None:
    """Load as vLLM's layerwise reload does in a round: layers get new tensors, which are then processed."""
    initialize_layerwise_reload(shadow)
    loaders: list[tuple[torch.Tensor, Any]] = []
    for layer in shadow.modules():
        info = get_layerwise_info(layer)
        for name, tensor in get_layer_tensors(layer).items():
            if not info.can_load() or name in layer._non_persistent_buffers_set:
                continue
            if not tensor.is_meta:  # vLLM loads it where it is
                if name in layer._parameters:
                    fill(tensor)
                continue
            if is_deferred_attention_layer(layer):
                loader = _get_original_loader(tensor)
                loaded = torch.rand(tensor.shape, device=info.restore_device) + 0.5  # a scale
                info.loaded_weights.append((name, inspect.signature(loader).bind(tensor, loaded)))
            else:
                loaders.append((tensor, tensor.weight_loader))
                tensor.weight_loader = _fill_parameter
                info.loaded_weights.append((name, inspect.signature(_fill_parameter).bind(tensor)))
            info.load_numel = _LOADED
    finalize_layerwise_reload(shadow, model_config)
    for tensor, loader in loaders:
        tensor.weight_loader = loader


def _fill_parameter(param: torch.Tensor) -> None:
    fill(param)


@torch.no_grad()
def fill(tensor: torch.Tensor) -> None:
    """Numbers that differ from vLLM's dummy weights, and are eight times as large: a scale that is derived
    from the largest one must differ as well, also one that is a power of two. Whole numbers of one byte are
    packed weights and may be anything; larger ones may be indices and become zero."""
    value = getattr(tensor, "dummy_weight_value", None)
    generator = torch.Generator(tensor.device).manual_seed(_SEED)
    if value is not None:
        tensor.fill_(value)  # vLLM's own: others would be refused
    elif tensor.is_floating_point():
        values = torch.empty(tensor.shape, dtype=torch.float16, device=tensor.device)
        tensor.copy_(values.uniform_(1e-4, 8e-3, generator=generator))
    elif tensor.itemsize == 1 and tensor.dtype != torch.bool:
        tensor.random_(0, 100, generator=generator)
    else:
        tensor.zero_()
