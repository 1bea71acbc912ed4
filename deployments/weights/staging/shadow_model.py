"""The shadow model of `device`: whether it is possible, how it is built, and what a swap copies.

It is a second instance of vLLM's own model, with its weights in the format of its kernels.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import _has_online_quant
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from deployments.weights.wire.checkpoint_schema import join_reasons
from deployments.weights.wire.digest import digest_tensor

GIB = 1 << 30
_LARGE_BYTES = 1 << 20
_RESERVE_BYTES = 1 << 30  # what loading needs beside the shadow itself


@dataclass
class Pairs:
    """Live tensors and their shadows, of equal dtype, shape and strides."""

    large: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    small: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)

    def add(self, live: torch.Tensor, shadow: torch.Tensor) -> None:
        # The driver's copy of one large tensor reaches the bandwidth of the memory; the fused copy of many,
        # which saves launches, reaches two thirds of it.
        if live.numel() * live.itemsize >= _LARGE_BYTES and live.is_contiguous():
            self.large.append((live, shadow))
        else:
            to, source = self.small.setdefault(live.dtype, ([], []))
            to.append(live)
            source.append(shadow)

    def copy_to_live(self) -> None:
        for live, shadow in self.large:
            live.copy_(shadow)
        for live_ones, shadows in self.small.values():
            torch._foreach_copy_(live_ones, shadows)

    def copy_to_shadow(self) -> None:
        for live, shadow in self.large:
            shadow.copy_(live)
        for live_ones, shadows in self.small.values():
            torch._foreach_copy_(shadows, live_ones)


def check_support(vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
    """Check that this engine's model can have a shadow.

    Raises:
        ValueError: all reasons why it cannot.
    """
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
    """Check that a second copy of the weights fits on the device.

    Raises:
        ValueError: it does not; the message has the sizes in GiB.
    """
    needed = _size_bytes(model)
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


def build_shadow(vllm_config: VllmConfig, device: torch.device) -> tuple[torch.nn.Module, bool]:
    """The shadow, in the format of its kernels, and whether vLLM processes weights after loading them."""
    config = copy.copy(vllm_config)
    # Layers register themselves here by name, and the runner finds the live ones by it.
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    model_config = vllm_config.model_config
    # The first digest on a device builds tables that all later ones read: not in the memory that sleeps.
    digest_tensor([torch.zeros(1, device=device)])
    with (
        _memory_pool(model_config.enable_sleep_mode),
        _own_rotary_embeddings(),
        set_current_vllm_config(config),
        set_default_torch_dtype(model_config.dtype),
    ):
        with device:
            shadow = initialize_model(config)
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(shadow, model_config)
        layerwise = config.quant_config is not None
        if _has_online_quant(shadow):
            finalize_layerwise_processing(shadow, model_config)
        before = {} if layerwise else _fingerprints(shadow)
        process_weights_after_loading(shadow, model_config, device)
        layerwise = layerwise or before != _fingerprints(shadow)
    if model_config.enable_sleep_mode:
        _move_buffers(shadow)
    return shadow.eval(), layerwise


def _move_buffers(shadow: torch.nn.Module) -> None:
    """Move the buffers out of the memory that sleeps, whose content is lost at level 2. A round fills
    parameters; no round sends buffers (rotary tables, attention scales, maps of experts), and vLLM saves only
    those of the live model."""
    for buffer in shadow.buffers():
        buffer.data = buffer.clone()  # the same object: vLLM refers to it from elsewhere too


def _fingerprints(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """Address, layout and digest of every parameter: equal if and only if nothing was processed.

    Buffers count by name only: attention sets its scales to 1 in place, in every model.
    """
    parameters = {name: parameter.data for name, parameter in model.named_parameters() if parameter.numel()}
    plain = {name: tensor for name, tensor in parameters.items() if tensor.is_cuda and tensor.is_contiguous()}
    digests = dict(zip(plain, digest_tensor(list(plain.values())).tolist(), strict=True)) if plain else {}
    return {
        name: (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, digests.get(name))
        for name, tensor in parameters.items()
    } | {name: () for name, _ in model.named_buffers()}


def pair(model: torch.nn.Module, shadow: torch.nn.Module) -> Pairs:
    """Everything that a swap copies: every tensor once, however many names it has (tied weights).

    Raises:
        ValueError: a tensor of the live model has no counterpart of the same dtype, shape and strides.
    """
    shadows = dict(_tensors(shadow))
    pairs, seen, problems = Pairs(), set(), []
    for name, live in _tensors(model):
        if live.data_ptr() in seen:
            continue
        seen.add(live.data_ptr())
        twin = shadows.get(name)
        if twin is None:
            problems.append(f"{name!r} has no counterpart")
        elif (live.shape, live.stride(), live.dtype) != (twin.shape, twin.stride(), twin.dtype):
            problems.append(
                f"{name!r} is {live.dtype} {list(live.shape)} {live.stride()} and its counterpart is "
                f"{twin.dtype} {list(twin.shape)} {twin.stride()}"
            )
        elif live.data_ptr() != twin.data_ptr():
            pairs.add(live, twin)
    if problems:
        raise ValueError(
            "staging 'device' is not possible: a second instance of this model differs from the one that "
            f"serves: {join_reasons(problems)}; use 'host' or 'none'"
        )
    return pairs


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, under every name that they have."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.numel() and not tensor.is_meta:
                yield f"{path}.{name}", tensor.data


def _size_bytes(model: torch.nn.Module) -> int:
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.itemsize for _, tensor in _tensors(model)}
    return sum(sizes.values())


@contextmanager
def _own_rotary_embeddings() -> Iterator[None]:
    # vLLM caches these modules by their arguments. A shadow that shared one with the live model would
    # replace the live model's table while it is loaded layer by layer.
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    live = dict(_ROPE_DICT)
    _ROPE_DICT.clear()
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(live)


def _memory_pool(sleep_mode: bool) -> AbstractContextManager[Any]:
    """With sleep mode the shadow sleeps and wakes with the weights."""
    if not sleep_mode:
        return nullcontext()
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance().use_memory_pool(tag="weights")
