"""Staging on the device: a shadow of the live parameters, filled while the engine decodes.

The shadow is a second instance of vLLM's own model, so whatever its loaders do (stacking, sharding
over TP and EP, padding, quantization) happens to the staged version exactly as it did to the live
one. A swap copies tensor over tensor: addresses stay, and captured CUDA graphs stay valid.

There are two ways to fill it, chosen at construction by what the model does after loading:

    direct      nothing: vLLM's loaders write into the shadow's parameters
    layerwise   weights are repacked or quantized (online fp8, MLA, some MoE kernels): vLLM's layerwise
                reload collects a layer's tensors, processes them and copies the result over the shadow

What cannot be staged: what a layer derives from its weights and keeps outside its parameters and
buffers (`_k_scale_float` of a calibrated fp8 cache), a draft model, LoRA (it wraps the live modules),
expert load balancing (it moves experts between ranks), and weights that are offloaded to the host.
The last three are refused at construction.
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
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_processing,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from deployments.weights.digest import digest_tensor
from deployments.weights.manifest import sentence

GIB = 1 << 30
_LARGE_BYTES = 1 << 20
_RESERVE = 1 << 30  # what loading needs beside the shadow itself


@dataclass
class Pairs:
    """Live tensors and their shadows."""

    large: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    small: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)

    def add(self, live: torch.Tensor, shadow: torch.Tensor) -> None:
        # The driver's copy of one large tensor reaches the memory's rate; the fused copy of many, which
        # saves launches, reaches two thirds of it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where NaN stands until loading writes there: the first and the last column of a parameter.

    Shards are ranges of rows or whole tensors, so one that did not come leaves its rows' marks, and
    the marks cost next to nothing (a mark in every element costs two passes over the weights).
    """

    shadow: torch.Tensor
    live: torch.Tensor
    places: torch.Tensor  # a view of `shadow`


class DeviceStaging:
    """A shadow model on the device of `model`.

    Built in the transfer engine's `__init__`, which vLLM runs after loading the weights and before
    it sizes the KV cache, so the cache gets what the shadow leaves.

    Raises:
        ValueError: the model cannot be staged on the device, or memory does not suffice.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        refuse_what_cannot_be_staged(vllm_config, device, model)
        refuse_if_it_does_not_fit(vllm_config, device, model)
        self._vllm_config = vllm_config
        self._shadow, self._layerwise = _build_shadow(vllm_config, device)
        self._pairs = _pairs(model, self._shadow)
        self._marks = _marks(self._shadow, model)
        with torch.no_grad():
            self._pairs.copy_to_shadow()
        self._open = False
        self._swapped = torch.cuda.Event()
        torch.cuda.current_stream(device).synchronize()

    def begin(self) -> None:
        self._open = False

    def add(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if not self._open:
            self._start()
        if self._layerwise:
            # The layerwise reload keeps the tensors until their layer is complete, longer than the
            # transport's buffer holds them.
            tensors = [(name, tensor.clone()) for name, tensor in tensors]
        with self._config(), disable_mtp_completeness_check():
            self._shadow.load_weights(tensors)

    def seal(self, *, complete: bool) -> list[str]:
        if not self._open:
            return list(self._marks)
        unfilled = self._seal_layers(complete) if self._layerwise else self._unwritten(complete)
        torch.cuda.current_stream().synchronize()
        if not unfilled:
            self._open = False
        return unfilled

    def swap(self) -> None:
        # Nothing waits for the copy: what the engine does next is queued behind it, on the stream on
        # which the model runs, and is prepared meanwhile. If the device fails, so does the next step.
        self._pairs.copy_to_live()
        self._swapped.record()

    def drop(self) -> None:
        if self._open and self._layerwise:
            self._abandon_layers()
        self._open = False

    def _start(self) -> None:
        self._open = True
        torch.cuda.current_stream().wait_event(self._swapped)  # the shadow may still be read
        if self._layerwise:
            with self._config():
                initialize_layerwise_reload(self._shadow)
            return
        # A layer that receives nothing would otherwise keep its old weights, and nothing would tell.
        for mark in self._marks.values():
            mark.places.fill_(float("nan"))

    def _unwritten(self, complete: bool) -> list[str]:
        sums = torch.stack([mark.places.sum(dtype=torch.float32) for mark in self._marks.values()])
        unfilled = [name for name, is_bad in zip(self._marks, sums.isnan().tolist(), strict=True) if is_bad]
        if not complete:
            return unfilled
        for name in unfilled:  # padding: it stays as it is
            mark = self._marks[name]
            mark.shadow.copy_(torch.where(mark.shadow.isnan(), mark.live, mark.shadow))
        return []

    def _seal_layers(self, complete: bool) -> list[str]:
        unfilled = []
        for name, layer in self._shadow.named_modules():
            info = get_layerwise_info(layer)
            wanted = info.load_numel_total
            if wanted and info.restore_metadata[0] and not (info.load_numel > 0 and complete):
                unfilled += [f"{name}.{parameter}" for parameter in info.restore_metadata[0]]
        unfilled = [name for name in unfilled if not _is_optional(name)]
        if unfilled:
            self._abandon_layers()
        else:
            with self._config():
                finalize_layerwise_reload(self._shadow, self._vllm_config.model_config)
        return unfilled

    def _abandon_layers(self) -> None:
        """Put the shadow's tensors back in place. Its content is void until the next round fills it."""
        for layer in self._shadow.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                _place_kernel_tensors(layer, info)
            info.reset()

    def _config(self) -> AbstractContextManager[Any]:
        # vLLM's current config is one global for all threads, so it is set only where processing reads it.
        return set_current_vllm_config(self._vllm_config) if self._layerwise else nullcontext()


def refuse_what_cannot_be_staged(
    vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
) -> None:
    reasons = []
    if device.type != "cuda":
        reasons.append(f"the engine runs on {device}, and a shadow needs a CUDA device")
    if vllm_config.lora_config is not None:
        reasons.append("LoRA wraps the live modules")
    if vllm_config.parallel_config.enable_eplb:
        reasons.append("expert load balancing moves experts between ranks")
    elsewhere = [name for name, p in model.named_parameters() if p.device.type != device.type]
    if elsewhere:
        reasons.append(f"weights are offloaded from the device: {sentence(elsewhere)}")
    if reasons:
        raise ValueError(f"staging 'device' is not possible: {'; '.join(reasons)}; use 'host' or 'none'")


def refuse_if_it_does_not_fit(vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
    needed = _size_bytes(model)
    free, total = torch.cuda.mem_get_info(device)
    fraction = vllm_config.cache_config.gpu_memory_utilization
    allowed = int(total * fraction) - needed
    if needed + _RESERVE <= min(free, allowed):
        return
    raise ValueError(
        f"staging 'device' needs a second copy of the weights, {needed / GIB:.1f} GiB and "
        f"{_RESERVE / GIB:.0f} GiB to load it, on {device}: {free / GIB:.1f} of {total / GIB:.1f} GiB are "
        f"free, and gpu_memory_utilization {fraction:g} leaves {allowed / GIB:.1f} GiB beside the live "
        "weights; raise gpu_memory_utilization, use more GPUs, or use staging 'host' or 'none'"
    )


def _build_shadow(vllm_config: VllmConfig, device: torch.device) -> tuple[torch.nn.Module, bool]:
    """A model in the format in which its kernels want it, and whether loading ends with processing."""
    config = copy.copy(vllm_config)
    # Layers register themselves here by name, and the runner finds the live ones by it.
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    model_config = vllm_config.model_config
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
    return shadow.eval(), layerwise


def _fingerprints(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """Where every parameter lies, its layout and its digest: equal if and only if nothing was processed.

    Buffers count by name only: attention sets its scales to 1 in place, in every model.
    """
    parameters = {name: parameter.data for name, parameter in model.named_parameters() if parameter.numel()}
    even = {name: tensor for name, tensor in parameters.items() if tensor.is_cuda and tensor.is_contiguous()}
    found = dict(zip(even, digest_tensor(list(even.values())).tolist(), strict=True)) if even else {}
    return {
        name: (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, found.get(name))
        for name, tensor in parameters.items()
    } | {name: () for name, _ in model.named_buffers()}


def _pairs(model: torch.nn.Module, shadow: torch.nn.Module) -> Pairs:
    """Everything that a swap copies: every tensor once, however many names it has (tied weights)."""
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
            f"serves: {sentence(problems)}; use 'host' or 'none'"
        )
    return pairs


def _marks(shadow: torch.nn.Module, model: torch.nn.Module) -> dict[str, Mark]:
    """One for each parameter that NaN can mark. An integer parameter has no such mark."""
    live = dict(model.named_parameters())
    return {
        name: Mark(shadow=parameter.data, live=live[name].data, places=_places(parameter.data))
        for name, parameter in shadow.named_parameters()
        if parameter.dtype in (torch.bfloat16, torch.float16, torch.float32) and name in live
    }


def _places(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2 or tensor.shape[-1] < 2:
        return tensor
    return tensor[..., :: tensor.shape[-1] - 1]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by path, under every name that they have."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.numel() and not tensor.is_meta:
                yield f"{path}.{name}", tensor.data


def _size_bytes(model: torch.nn.Module) -> int:
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.itemsize for _, tensor in _tensors(model)}
    return sum(sizes.values())


def _is_optional(name: str) -> bool:
    """Scales of attention that most checkpoints do not have; vLLM fills them after loading."""
    return name.endswith(("k_scale", "v_scale", "q_scale", "prob_scale"))


@contextmanager
def _own_rotary_embeddings() -> Iterator[None]:
    # vLLM caches these modules by their arguments: a shadow that shared one with the live model would
    # take the live model's table away while it is loaded layer by layer.
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
