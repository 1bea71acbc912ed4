"""Staging beside the model that serves: a second instance, loaded and packed while the engine decodes.

    begin       the second instance gets memory for parameters as a checkpoint has them
    add         vLLM's own loaders fill them
    finalize    vLLM packs layer by layer; the engine decodes in between
    swap        parameters and packed layers of the two are exchanged, inside the pause
    retire      the former version is freed, beside the engine again

Everything that takes time is done as vLLM does it when an engine starts, so what serves then is what a fresh
engine would have loaded. Memory for a second version is taken from the first chunk of a round to its end.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.cpu_resource_utils import get_memory_node_info
from vllm.utils.torch_utils import set_default_torch_dtype

from deployments.weights.staging.base import Tensors
from deployments.weights.staging.cpu_exchange import Exchange
from deployments.weights.staging.worker_reports import LoadPlanSummary
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk
from deployments.weights.wire.digest_definition import Findings


class Loaded(Enum):
    """How much of a parameter was loaded."""

    NOTHING = auto()
    PART = auto()
    ALL = auto()


@dataclass(slots=True, kw_only=True)
class BlankParameter:
    """One parameter, as the model's constructor made it.

    Attributes:
        places: the modules that have it, with their path and its name there; several if weights are tied.
    """

    parameter: torch.nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    places: list[tuple[str, torch.nn.Module, str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Its name in the model; several if weights are tied."""
        return [f"{path}.{name}" if path else name for path, _, name in self.places]

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.parameter.itemsize

    def place(self, memory: torch.Tensor) -> None:
        """Put it where its modules had it before they were processed, with this memory."""
        self.parameter.data = memory
        for _, module, name in self.places:
            module._parameters[name] = self.parameter

    def loaded(self) -> Loaded:
        missing = _columns(self.parameter.data).isnan()
        if not missing.any():
            return Loaded.ALL
        return Loaded.NOTHING if missing.all() else Loaded.PART

    def pad(self) -> None:
        """Zero what was not loaded of it: padding, which no checkpoint contains."""
        data = self.parameter.data
        if data.dim() > 1:
            data[data[..., 0].isnan()] = 0  # the columns between were never written either
        data.masked_fill_(data.isnan(), 0)


class BlankParameters:
    """The parameters of an instance that was constructed and not processed. They have no memory at first."""

    def __init__(self, model: torch.nn.Module) -> None:
        blanks: dict[int, BlankParameter] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    new = BlankParameter(
                        parameter=parameter, shape=parameter.shape, stride=parameter.stride()
                    )
                    blanks.setdefault(id(parameter), new).places.append((path, module, name))
        self._blanks = list(blanks.values())
        self.release()

    def __iter__(self) -> Iterator[BlankParameter]:
        return iter(self._blanks)

    def allocate(self) -> None:
        """Give all of them memory, with NaN in its first and last columns."""
        for blank in self._blanks:
            dtype = blank.parameter.dtype
            memory = torch.empty_strided(blank.shape, blank.stride, dtype=dtype)
            _columns(memory).fill_(float("nan") if dtype.is_floating_point else 0)
            blank.place(memory)

    def release(self) -> None:
        """Free the memory of all parameters, also of those that processing made."""
        for blank in self._blanks:
            blank.place(torch.empty(0, dtype=blank.parameter.dtype))


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    """The first and the last column, or the tensor itself if it has only one; a view."""
    if tensor.dim() > 1 and tensor.shape[-1] > 1:
        return tensor[..., :: tensor.shape[-1] - 1]
    return tensor


# Staging beside the model that serves: a second instance, loaded and packed while the engine decodes.
#
#     begin       the second instance gets memory for parameters as a checkpoint has them
#     add         vLLM's own loaders fill them
#     finalize    vLLM packs layer by layer; the engine decodes in between
#     swap        parameters and packed layers of the two are exchanged, inside the pause
#     retire      the former version is freed, beside the engine again
#
# Everything that takes time is done as vLLM does it when an engine starts, so what serves then is what a
# fresh engine would have loaded. Memory for a second version is taken from the first chunk of a round to its
# end.

GIB = 1 << 30


class CpuShadowStaging:
    """Fills a second instance of the model that serves, and exchanges the two.

    Args:
        model: loaded and processed, and has not done a step.
        shadow: constructed and not loaded.

    Raises:
        ValueError: the two differ in something that a swap could not exchange, or memory does not suffice.
    """

    def __init__(self, vllm_config: VllmConfig, model: torch.nn.Module, shadow: torch.nn.Module) -> None:
        self._vllm_config = vllm_config
        self._live, self._shadow = model, shadow
        self._exchange = Exchange(model, shadow)
        self._blanks = BlankParameters(shadow)
        check_memory(vllm_config, sum(blank.size_bytes for blank in self._blanks))
        self._open = False

    def begin(self) -> None:
        self._open = False

    def replay(self, received: ReceivedChunk) -> Findings | None:
        return None

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        if not self._open:
            self._open = True
            self._blanks.allocate()
        with disable_mtp_completeness_check():  # a chunk is a part
            self._shadow.load_weights(tensors)

    def plans(self) -> LoadPlanSummary:
        return LoadPlanSummary()

    def finalize(self, *, complete: bool, rest: Callable[[], None]) -> list[str]:
        if not self._open:
            return [name for blank in self._blanks for name in blank.names]
        untouched, unfilled = self._untouched(complete)
        if unfilled:
            return unfilled
        with set_current_vllm_config(self._vllm_config):
            for path, module in self._shadow.named_modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, QuantizeMethodBase) and path not in untouched:
                    if isinstance(method, UnquantizedFusedMoEMethod):
                        method.moe_kernel = None  # vLLM packs experts only where it makes their kernel
                    method.process_weights_after_loading(module)
                    rest()
            for path, module in self._shadow.named_modules():
                if is_deferred_attention_layer(module) and path not in untouched:
                    module.process_weights_after_loading(self._vllm_config.model_config.dtype)
        self._exchange.collect(untouched)
        return []

    def swap(self) -> None:
        self._exchange.swap()

    def load(self, path: str) -> bool:
        return False

    def retire(self) -> None:
        self._open = False
        self._exchange.release()
        self._blanks.release()

    def drop(self) -> None:
        self.retire()

    def release(self) -> None:
        pass

    def _untouched(self, complete: bool) -> tuple[set[str], list[str]]:
        """Paths of modules that keep what they have, and names of parameters that lack something."""
        states: dict[str, set[bool]] = {}  # by path: of its parameters, whether something was loaded
        unfilled: list[str] = []
        alone = []  # parameters of which nothing was loaded
        for blank in self._blanks:
            loaded = blank.loaded()
            if loaded is not Loaded.ALL and not complete:
                unfilled += blank.names
            if loaded is Loaded.PART:
                blank.pad()
            if loaded is Loaded.NOTHING:
                alone.append(blank)
            for path, _, _ in blank.places:
                states.setdefault(path, set()).add(loaded is not Loaded.NOTHING)
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
        """Copy a parameter of which nothing was loaded, beside others of its module, from the live model.
        Returns its name if it was packed there."""
        live = self._live.get_submodule(path)._parameters[name]
        if live is None or live.shape != blank.shape:
            return [f"{path}.{name}"]
        blank.parameter.data.copy_(live.data)
        return []


def shadow_staging(vllm_config: VllmConfig, model: torch.nn.Module) -> CpuShadowStaging:
    """The staging of an engine whose model was loaded.

    Called in the transfer engine's `__init__`: later the layers that serve have what the runner adds to them.

    Raises:
        ValueError: it is not possible.
    """
    try:
        check_support(vllm_config, model)
        return CpuShadowStaging(vllm_config, model, build_shadow(vllm_config))
    except Exception as error:  # also what a model's own constructor raises the second time
        raise ValueError(f"staging 'device' is not possible on this CPU: {error}; 'host' is") from error


def check_support(vllm_config: VllmConfig, model: torch.nn.Module) -> None:
    """Check that this engine's model can have a second instance.

    Raises:
        ValueError: all reasons why it cannot.
    """
    reasons = []
    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        reasons.append("it is compiled ('enforce_eager: true' compiles nothing)")
    if vllm_config.lora_config is not None:
        reasons.append("LoRA wraps the modules that serve")
    if vllm_config.quant_config is not None:
        reasons.append("its weights are quantized")
    if vllm_config.parallel_config.enable_eplb:
        reasons.append("expert load balancing moves experts between ranks")
    if hasattr(model, "process_weights_after_loading"):
        reasons.append(f"{type(model).__name__} processes weights as a whole")
    if reasons:
        raise ValueError("; ".join(reasons))


def build_shadow(vllm_config: VllmConfig) -> torch.nn.Module:
    """A second instance, constructed and not loaded. Its parameters have memory that nobody has touched."""
    config = copy.copy(vllm_config)
    # Layers register themselves here by name, and the runner finds the ones that serve by it.
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("cpu"):
        return initialize_model(config).eval()  # as the one that serves is


def check_memory(vllm_config: VllmConfig, needed: int) -> None:
    """Check that a second version fits beside the KV cache, which is allocated later.

    Raises:
        ValueError: it does not; the message has the sizes in GiB.
    """
    cache = vllm_config.cache_config.kv_cache_memory_bytes or 0
    available = get_memory_node_info().available_memory
    if needed + cache > available:
        raise ValueError(
            f"a second copy of the weights needs {needed / GIB:.1f} GiB, and the KV cache {cache / GIB:.1f} "
            f"of the {available / GIB:.1f} GiB that are free"
        )
