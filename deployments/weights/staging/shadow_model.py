"""A second instance of vLLM's own model, in the format of its kernels."""

import copy
import inspect
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader import DummyModelLoader
from vllm.model_executor.model_loader.base_loader import _has_online_quant
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_processing,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from deployments.weights.staging.base import GIB, second_instance_config
from deployments.weights.staging.derived import Moving, classify, keep_constants
from deployments.weights.staging.drafted_model import second_instance
from deployments.weights.staging.observation import changed_tensors, differing, observe
from deployments.weights.staging.pairs import named_tensors
from deployments.weights.staging.reachable import path_name, reachable
from deployments.weights.wire.checkpoint_schema import join_reasons
from deployments.weights.wire.digest import digest_tensor

_SEED = 4321
_LOADED: Any = 0.5  # a part: vLLM processes the layer at the end


def load_in_place(shadow: torch.nn.Module, model_config: ModelConfig, device: torch.device) -> None:
    for parameter in shadow.parameters():
        fill(parameter)
    process_weights_after_loading(shadow, model_config, device)


def load_by_layers(shadow: torch.nn.Module, model_config: ModelConfig) -> None:
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
                loaded = torch.rand(tensor.shape, device=info.restore_device) + 0.5
                info.loaded_weights.append((name, inspect.signature(loader).bind(tensor, loaded)))
            else:
                loaders.append((tensor, tensor.weight_loader))
                tensor.weight_loader = fill
                info.loaded_weights.append((name, inspect.signature(fill).bind(tensor)))
            info.load_numel = _LOADED
    finalize_layerwise_reload(shadow, model_config)
    for tensor, loader in loaders:
        tensor.weight_loader = loader


@torch.no_grad()
def fill(param: torch.Tensor) -> None:
    """A weight loader: numbers eight times vLLM's dummy weights, so that derived scales differ."""
    value = getattr(param, "dummy_weight_value", None)
    generator = torch.Generator(param.device).manual_seed(_SEED)
    if value is not None:  # vLLM may refuse values far from its dummy value (norms since 0.33, scales)
        param.fill_(value + (0.25 if param.is_floating_point() else 1))
    elif param.is_floating_point():
        values = torch.empty(param.shape, dtype=torch.float16, device=param.device)
        param.copy_(values.uniform_(1e-4, 8e-3, generator=generator))
    elif param.itemsize == 1 and param.dtype != torch.bool:
        param.random_(0, 100, generator=generator)
    elif param.dtype == torch.int64:
        param.fill_(1)
    else:
        param.zero_()


_RESERVE_BYTES = 1 << 30  # what loading needs beside the shadow itself


def check_support(vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
    reasons = []
    if device.type != "cuda":
        reasons.append(f"the engine runs on {device}, and a shadow needs a CUDA device")
    if vllm_config.lora_config is not None:
        reasons.append("LoRA wraps the live modules")
    if vllm_config.parallel_config.enable_eplb:
        reasons.append("expert load balancing moves experts between ranks")
    offloaded = [name for name, p in model.named_parameters() if p.device.type != device.type]
    if offloaded:
        reasons.append(f"weights are offloaded from the device: {join_reasons(offloaded)}")
    if reasons:
        raise ValueError(f"staging 'device' is not possible: {'; '.join(reasons)}; use 'host' or 'none'")


def check_memory(vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
    needed = sum({t.data_ptr(): t.numel() * t.itemsize for _, t in named_tensors(model)}.values())
    free, total = torch.cuda.mem_get_info(device)
    fraction = vllm_config.cache_config.gpu_memory_utilization
    allowed = int(total * fraction) - needed
    if needed + _RESERVE_BYTES <= min(free, allowed):
        return
    raise ValueError(
        f"staging 'device' needs a second copy of the weights, {needed / GIB:.1f} GiB and "
        f"{_RESERVE_BYTES / GIB:.0f} GiB to load it, on {device}: {free / GIB:.1f} of {total / GIB:.1f} GiB "
        f"are free, and gpu_memory_utilization {fraction:g} leaves {allowed / GIB:.1f} GiB beside the live "
        "weights; raise gpu_memory_utilization, use more GPUs, or use staging 'host' or 'none'"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    model: torch.nn.Module
    layerwise: bool
    moving: Moving


def build_shadow(vllm_config: VllmConfig, device: torch.device, live: torch.nn.Module) -> Shadow:
    """Raises ValueError, naming live state derived from weights that a round could not replace."""
    config = second_instance_config(vllm_config)
    config.model_config = model_config = copy.copy(vllm_config.model_config)
    # vLLM ties embeddings that are equal in the checkpoint; a later version's may differ.
    model_config.word_embeddings_untied_by_checkpoint = False
    before = observe(live)
    # The first digest builds tables that all later ones use: keep them out of memory that sleeps.
    digest_tensor([torch.zeros(1, device=device)])
    with (
        _memory_pool(model_config.enable_sleep_mode),
        _own_rotary_embeddings(),
        set_current_vllm_config(config),
        set_default_torch_dtype(model_config.dtype),
    ):
        with device, _marked_memory():
            shadow = second_instance(config, live)
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(shadow, model_config)
        layerwise = config.quant_config is not None
        if _has_online_quant(shadow):
            finalize_layerwise_processing(shadow, model_config)
        parameters = {} if layerwise else _fingerprints(shadow)
        process_weights_after_loading(shadow, model_config, device)
        layerwise = layerwise or parameters != _fingerprints(shadow)
        first = second = observe(shadow)
        if not layerwise:
            load_in_place(shadow, model_config, device)
            second = observe(shadow)
            layerwise = bool(differing(before, first) or differing(first, second))
        if layerwise:
            load_by_layers(shadow, model_config)
            second = observe(shadow)
    moving = classify(before, first, second, layerwise=layerwise)
    disturbed = changed_tensors(before, observe(live))
    if disturbed:
        raise ValueError(
            "staging 'device' is not possible: building a second instance of this model changed the one that "
            f"serves: {join_reasons([path_name(path) for path in disturbed])}; use 'host' or 'none'"
        )
    if model_config.enable_sleep_mode:
        _move_buffers(shadow)
        keep_constants(before, moving, device)
    return Shadow(model=shadow, layerwise=layerwise, moving=moving)


@contextmanager
def _marked_memory() -> Iterator[None]:
    """New memory is NaN or the largest integer, to recognize unwritten parts."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _move_buffers(shadow: torch.nn.Module) -> None:
    """Move all but the parameters out of memory that sleeps: level 2 loses it, and no round sends it."""
    parameters = {id(parameter) for parameter in shadow.parameters()}
    for tensor in reachable(shadow).tensors.values():
        if id(tensor) not in parameters:
            tensor.data = tensor.clone()  # the same object: vLLM refers to it from elsewhere too


def _fingerprints(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """Equal if nothing was processed. Buffers count by name: attention sets its scales in place."""
    parameters = {name: parameter.data for name, parameter in model.named_parameters() if parameter.numel()}
    plain = {name: tensor for name, tensor in parameters.items() if tensor.is_cuda and tensor.is_contiguous()}
    digests = dict(zip(plain, digest_tensor(list(plain.values())).tolist(), strict=True)) if plain else {}
    return {
        name: (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, digests.get(name))
        for name, tensor in parameters.items()
    } | {name: () for name, _ in model.named_buffers()}


@contextmanager
def _own_rotary_embeddings() -> Iterator[None]:
    # vLLM caches these modules; loading would replace the table of a shared one.
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    live = dict(_ROPE_DICT)
    _ROPE_DICT.clear()
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(live)


def _memory_pool(sleep_mode: bool) -> AbstractContextManager[Any]:
    if not sleep_mode:
        return nullcontext()
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance().use_memory_pool(tag="weights")  # sleeps and wakes with them
