"""Staging on a CPU: vLLM loads and packs a second instance of the model while the engine decodes, and a swap
exchanges the two. The second has memory only during a round."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.utils.cpu_resource_utils import get_memory_node_info
from vllm.utils.torch_utils import set_default_torch_dtype

from deployments.weights.staging.base import GIB, Staging, Tensors, outer_columns, second_instance_config
from deployments.weights.staging.cpu_exchange import Exchange
from deployments.weights.staging.drafted_model import second_instance
from deployments.weights.store.versions import DRAFTER
from deployments.weights.wire.chunk_layout import Chunk


@dataclass(slots=True, kw_only=True)
class BlankParameter:
    parameter: torch.nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    # Path, module and name there; several if weights are tied.
    places: list[tuple[str, torch.nn.Module, str]] = field(default_factory=list)
    views: list[tuple[torch.Tensor, torch.Size, tuple[int, ...]]] = field(default_factory=list)  # buffers

    @property
    def names(self) -> list[str]:
        return [f"{path}.{name}" if path else name for path, _, name in self.places]

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.parameter.itemsize

    def allocate(self) -> None:
        dtype = self.parameter.dtype
        memory = torch.empty_strided(self.shape, self.stride, dtype=dtype)
        outer_columns(memory).fill_(float("nan") if dtype.is_floating_point else 0)
        self._place(memory)

    def release(self) -> None:
        self._place(torch.empty(0, dtype=self.parameter.dtype))

    def _place(self, memory: torch.Tensor) -> None:
        self.parameter.data = memory
        for buffer, shape, stride in self.views:
            buffer.data = memory.as_strided(shape, stride) if memory.numel() else memory
        for _, module, name in self.places:
            module._parameters[name] = self.parameter

    def lacks(self) -> tuple[bool, bool]:
        missing = outer_columns(self.parameter.data).isnan()
        some = bool(missing.any())
        return some, some and bool(missing.all())

    def pad(self) -> None:
        data = self.parameter.data
        if data.dim() > 1:
            data[data[..., 0].isnan()] = 0  # the columns between were never written either
        data.masked_fill_(data.isnan(), 0)


def blank_parameters(model: torch.nn.Module) -> list[BlankParameter]:
    blanks: dict[int, BlankParameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = BlankParameter(parameter=parameter, shape=parameter.shape, stride=parameter.stride())
                blanks.setdefault(id(parameter), new).places.append((path, module, name))
    at = {blank.parameter.data_ptr(): blank for blank in blanks.values()}
    for buffer in model.buffers():  # Mamba's second shape of its convolution
        if buffer.numel() and (blank := at.get(buffer.data_ptr())) is not None:
            blank.views.append((buffer, buffer.shape, buffer.stride()))
    for blank in blanks.values():
        blank.release()
    return list(blanks.values())


class CpuShadowStaging(Staging):
    """Raises ValueError if a swap could not exchange the instances, or memory is short."""

    def __init__(self, vllm_config: VllmConfig, model: torch.nn.Module, shadow: torch.nn.Module) -> None:
        self._vllm_config = vllm_config
        self._live, self._shadow = model, shadow
        self._exchange = Exchange(model, shadow)
        self._blanks = blank_parameters(shadow)
        check_cpu_memory(vllm_config, sum(blank.size_bytes for blank in self._blanks))
        self._open = False

    def begin(self) -> None:
        self._open = False

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        if not self._open:
            self._open = True
            for blank in self._blanks:
                blank.allocate()
        with disable_mtp_completeness_check():  # each chunk is a part
            self._shadow.load_weights(tensors)

    def finalize(
        self, *, complete: bool, check_open: Callable[[], None], keep_drafter: bool = False
    ) -> list[str]:
        if not self._open:
            return [name for blank in self._blanks for name in blank.names]
        untouched, unfilled = self._untouched(complete, keep_drafter)
        if unfilled:
            return unfilled
        with set_current_vllm_config(self._vllm_config):
            for path, module in self._shadow.named_modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, QuantizeMethodBase) and path not in untouched:
                    if isinstance(method, UnquantizedFusedMoEMethod):
                        method.moe_kernel = None  # vLLM packs experts only where it makes their kernel
                    method.process_weights_after_loading(module)
                    check_open()
            for path, module in self._shadow.named_modules():
                if is_deferred_attention_layer(module) and path not in untouched:
                    module.process_weights_after_loading(self._vllm_config.model_config.dtype)
        self._exchange.collect(untouched)
        return []

    def swap(self) -> None:
        self._exchange.swap()

    def retire(self) -> None:
        self._open = False
        self._exchange.release()
        for blank in self._blanks:
            blank.release()

    def drop(self) -> None:
        self.retire()

    def _untouched(self, complete: bool, keep_drafter: bool) -> tuple[set[str], list[str]]:
        states: dict[str, set[bool]] = {}
        unfilled: list[str] = []
        alone = []
        for blank in self._blanks:
            kept = keep_drafter and blank.names[0].startswith(DRAFTER)
            some, everything = (True, True) if kept else blank.lacks()
            if some and not complete and not kept:
                unfilled += blank.names
            if everything:
                alone.append(blank)
            elif some:
                blank.pad()
            for path, _, _ in blank.places:
                states.setdefault(path, set()).add(not everything)
        untouched = {path for path, found in states.items() if found == {False}}
        for blank in alone:
            for path, _, name in blank.places:
                if path not in untouched:
                    unfilled += self._keep(blank, path, name)
        for path, module in self._shadow.named_modules():
            if is_deferred_attention_layer(module):
                below = {each in untouched for each in states if each.startswith(f"{path}.")}
                if below == {True}:
                    untouched.add(path)
                elif len(below) == 2:
                    unfilled += [f"{each}.*" for each in untouched if each.startswith(f"{path}.")]
        return untouched, unfilled

    def _keep(self, blank: BlankParameter, path: str, name: str) -> list[str]:
        """Copy what did not arrive from the live model; returns its name if it is packed there."""
        live = self._live.get_submodule(path)._parameters[name]
        if live is None or live.shape != blank.shape:
            return [f"{path}.{name}"]
        blank.parameter.data.copy_(live.data)
        return []


def cpu_shadow_staging(vllm_config: VllmConfig, model: torch.nn.Module) -> CpuShadowStaging:
    """Call it before the runner adds to the live layers. Raises ValueError."""
    try:
        check_cpu_support(vllm_config, model)
        dtype = vllm_config.model_config.dtype
        with set_default_torch_dtype(dtype), torch.device("cpu"):
            shadow = second_instance(second_instance_config(vllm_config), model)
        return CpuShadowStaging(vllm_config, model, shadow)
    except Exception as error:  # includes what the model's constructor raises the second time
        raise ValueError(f"staging 'device' is not possible on this CPU: {error}; 'host' is") from error


def check_cpu_support(vllm_config: VllmConfig, model: torch.nn.Module) -> None:
    reasons = []
    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        reasons.append("it is compiled ('enforce_eager: true' compiles nothing)")
    if vllm_config.lora_config is not None:
        reasons.append("LoRA wraps the live modules")
    if vllm_config.quant_config is not None:
        reasons.append("its weights are quantized")
    if vllm_config.parallel_config.enable_eplb:
        reasons.append("expert load balancing moves experts between ranks")
    if hasattr(model, "process_weights_after_loading"):
        reasons.append(f"{type(model).__name__} processes weights as a whole")
    if reasons:
        raise ValueError("; ".join(reasons))


def check_cpu_memory(vllm_config: VllmConfig, needed: int) -> None:
    cache = vllm_config.cache_config.kv_cache_memory_bytes or 0
    available = get_memory_node_info().available_memory
    if needed + cache > available:
        raise ValueError(
            f"a second copy of the weights needs {needed / GIB:.1f} GiB, and the KV cache {cache / GIB:.1f} "
            f"of the {available / GIB:.1f} GiB that are free"
        )
