"""Staging in host memory: the tensors wait there and are loaded inside the pause."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.lora.layers import FusedMoEWithLoRA
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from deployments.weights.staging.base import Staging, Tensors, check_draft
from deployments.weights.staging.worker_reports import LoadPlanSummary
from deployments.weights.wire.checkpoint_schema import join_reasons
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk
from deployments.weights.wire.digest_definition import Findings

# Attention with a latent cache (MLA) on a CPU with AMX: vLLM packs the weight of `kv_b_proj`, and drops it.
#
# Its reload would copy the new weight into what is left, an empty tensor, and fail in the middle of the
# model.


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


logger = init_logger(__name__)

# Models of vLLM whose `load_weights` copies into parameters itself. The layerwise reload does not see these
# copies, and keeps what was loaded before.
_COPYING = (
    "GptOssForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM",
    "Step3TextForCausalLM",
    "Step3p5ForCausalLM",
)


class HostStaging:
    """The staged tensors by name, and the live model into which a swap loads them."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        """Raises ValueError if vLLM cannot replace this model's weights."""
        if (refusal := _copying_refusal(model)) is not None:
            raise ValueError(f"staging 'host' is not possible: {refusal}")
        self._model = model
        self._model_config = model_config
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        self._tensors = {}

    def replay(self, received: ReceivedChunk) -> Findings | None:
        return None  # there is nothing to save: `add` only holds the tensors

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        self._tensors.update((name, tensor.cpu()) for name, tensor in tensors)

    def plans(self) -> LoadPlanSummary:
        return LoadPlanSummary()

    def finalize(self, *, complete: bool, rest: Callable[[], None]) -> list[str]:
        # An engine whose base cannot be replaced may still serve adapters.
        if (refusal := reload_refusal(self._model)) is not None:
            raise ValueError(refusal)
        self._check_tied()
        return lacking(self._model, self._tensors)

    def _check_tied(self) -> None:
        """Check that the output embeddings arrived equal to the input embeddings where vLLM made them one.

        It does so if the configuration ties them, and the checkpoint that it loaded has both and equal. What
        is loaded last would be both.

        Raises:
            ValueError: they differ.
        """
        if not (_tied_heads(self._model) and self._model_config.word_embeddings_untied_by_checkpoint):
            return
        for name, head in self._tensors.items():
            if not name.endswith("lm_head.weight"):
                continue
            alike = (each for other, each in self._tensors.items() if other != name)
            if not any(each.shape == head.shape and torch.equal(each, head) for each in alike):
                raise ValueError(
                    f"{name!r} must be equal to the input embeddings: config.json has tie_word_embeddings, "
                    "and in the checkpoint that this engine loaded they are; start the engine from one where "
                    "they differ, or with tie_word_embeddings: false"
                )

    def swap(self) -> None:
        # On a CPU, linear weights are repacked after loading: only the layerwise reload, which runs
        # that step again, changes what the model computes.
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        with replacing_all(self._model):
            initialize_layerwise_reload(self._model)
            self._model.load_weights(self._tensors.items())
            finalize_layerwise_reload(self._model, self._model_config)
        self.drop()

    def load(self, path: str) -> bool:
        return False

    def retire(self) -> None:
        pass

    def drop(self) -> None:
        self._tensors = {}

    def release(self) -> None:
        pass


def make_staging(vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> Staging:
    """The staging that an engine is configured with: this one, or the device's.

    Raises:
        ValueError: it is not possible for this model.
    """
    check_draft(vllm_config)
    configured = vllm_config.additional_config.get("staging", "host")
    if configured in ("device", "automatic") and device.type == "cpu":
        from deployments.weights.staging.cpu_shadow import shadow_staging

        try:
            return shadow_staging(vllm_config, model)
        except ValueError as error:
            if configured == "device":
                raise
            logger.warning("%s; updates load inside the pause", error)
    elif configured == "device":
        from deployments.weights.staging.device import DeviceStaging

        return DeviceStaging(vllm_config, device, model)
    return HostStaging(model, vllm_config.model_config)


def reload_refusal(model: torch.nn.Module) -> str | None:
    """Why vLLM's reload of this model would not replace all weights; None: it would."""
    if any(isinstance(module, FusedMoEWithLoRA) for module in model.modules()):
        return (
            "vLLM's reload keeps the former weights of experts that LoRA wraps, without a word: a fleet with "
            "'enable_lora' serves adapters of this mixture of experts, and cannot replace its base"
        )
    return _copying_refusal(model)


def _copying_refusal(model: torch.nn.Module) -> str | None:
    if quantized := not_reloadable(model):
        return (
            f"vLLM's AMX kernels keep nothing that its reload could fill of {join_reasons(quantized)}, whose "
            "weights are quantized; 'attention_backend: CPU_MLA' in 'engine_args' does"
        )
    copying = [name for name in (type(each).__name__ for each in model.modules()) if name in _COPYING]
    if not copying:
        return None
    return (
        f"vLLM's {copying[0]} copies weights past its loaders, and its reload would keep the former ones "
        "without a word; use staging 'device' on a GPU"
    )


@contextmanager
def replacing_all(model: torch.nn.Module) -> Iterator[None]:
    """Around vLLM's layerwise reload of a model: what a CPU packed of the former weights is packed again.

    vLLM packs experts only where it makes their kernel, which a reload keeps: it would read raw weights as
    packed ones. It does not process output embeddings that are tied, as nothing is loaded into them. It drops
    weights of MLA that it packed for AMX. If the reload fails, layers that it did not come to have their
    kernels again.
    """
    make_reloadable(model)
    found = (getattr(module, "quant_method", None) for module in model.modules())
    methods = [each for each in found if isinstance(each, UnquantizedFusedMoEMethod)]
    kernels = [
        (each, each.moe_kernel) for each in methods if each.unquantized_backend is UnquantizedMoeBackend.CPU
    ]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # nothing was loaded into this layer: its weights are still packed
                method.moe_kernel = kernel
    for head in _tied_heads(model):
        head.quant_method.process_weights_after_loading(head)


def _tied_heads(model: torch.nn.Module) -> list[ParallelLMHead]:
    """The output embeddings whose weight is that of the input embeddings."""
    found = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)
        and isinstance(module.quant_method, UnquantizedEmbeddingMethod)
    ]
    weights = {id(each.weight) for each in found if not isinstance(each, ParallelLMHead)}
    return [each for each in found if isinstance(each, ParallelLMHead) and id(each.weight) in weights]
