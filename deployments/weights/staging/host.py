"""Staging in host memory: vLLM's layerwise reload loads the tensors inside the pause."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.lora.layers import FusedMoEWithLoRA
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from deployments.weights.staging.base import Staging, Tensors
from deployments.weights.staging.drafted_model import PolicyAndDrafter, checkpoint_tensors
from deployments.weights.store.versions import DRAFTER
from deployments.weights.wire.chunk_layout import Chunk

# Models whose `load_weights` copies into parameters itself, which the layerwise reload undoes.
_COPYING = (
    "GptOssForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM",
    "Step3TextForCausalLM",
    "Step3p5ForCausalLM",
)


class HostStaging(Staging):
    """Raises ValueError if vLLM cannot replace this model's weights."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        if (refusal := reload_refusal(model, with_lora=False)) is not None:  # it may serve adapters
            raise ValueError(f"staging 'host' is not possible: {refusal}")
        self._model = model
        self._model_config = model_config
        self._tensors: dict[str, torch.Tensor] = {}
        self._keep_drafter = False

    def begin(self) -> None:
        self._tensors = {}

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        self._tensors.update((name, tensor.cpu()) for name, tensor in tensors)

    def finalize(
        self, *, complete: bool, check_open: Callable[[], None], keep_drafter: bool = False
    ) -> list[str]:
        self._keep_drafter = keep_drafter
        if (refusal := reload_refusal(self._model)) is not None:
            raise ValueError(refusal)
        self._check_tied()
        return []

    def _check_tied(self) -> None:
        """vLLM ties embeddings that are equal."""
        if not (_tied_heads(self._model) and self._model_config.word_embeddings_untied_by_checkpoint):
            return
        for name, head in self._tensors.items():
            if not name.endswith("lm_head.weight") or name.startswith(DRAFTER):
                continue
            alike = (each for other, each in self._tensors.items() if other != name)
            if not any(each.shape == head.shape and torch.equal(each, head) for each in alike):
                raise ValueError(
                    f"{name!r} must be equal to the input embeddings: config.json has tie_word_embeddings, "
                    "and in the checkpoint that this engine loaded they are; start the engine from one where "
                    "they differ, or with tie_word_embeddings: false"
                )

    def swap(self) -> None:
        # Only the reload packs linear weights again on a CPU.
        model = self._model
        if self._keep_drafter and isinstance(model, PolicyAndDrafter):
            model = model.policy
        with replacing_all(model):
            initialize_layerwise_reload(model)
            model.load_weights(self._tensors.items())
            finalize_layerwise_reload(model, self._model_config)
        self.drop()

    def drop(self) -> None:
        self._tensors = {}


def load_with_drafter(vllm_config: VllmConfig, model: PolicyAndDrafter, path: str) -> None:
    staging = HostStaging(model, vllm_config.model_config)
    staging._tensors = dict(checkpoint_tensors(vllm_config, model, path))
    staging.swap()


def reload_refusal(model: torch.nn.Module, *, with_lora: bool = True) -> str | None:
    """Why vLLM's reload would leave weights out; None: it would not. `with_lora`: also because of LoRA."""
    for module in model.modules():
        if with_lora and isinstance(module, FusedMoEWithLoRA):
            return (
                "vLLM's reload silently keeps the former weights of experts that LoRA wraps: a fleet with "
                "'enable_lora' serves adapters of this mixture of experts, and cannot replace its base"
            )
        if isinstance(module, MLAAttention) and module.is_amx_bmm_enabled:
            return (
                "vLLM's AMX kernels for MLA drop the weights of 'kv_b_proj', which its reload fills; "
                "'engine.extra.attention_backend: CPU_MLA' keeps them"
            )
        if type(module).__name__ in _COPYING:
            return (
                f"vLLM's {type(module).__name__} copies weights past its loaders, and its reload would "
                "silently keep the former ones; use staging 'device' on a GPU"
            )
    return None


@contextmanager
def replacing_all(model: torch.nn.Module) -> Iterator[None]:
    """vLLM's reload leaves some weights packed (experts, tied heads) or unpacked (Mamba 2's convolution on a
    CPU that multiplies bfloat16): pack or copy them."""
    kernels = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and (
            method.unquantized_backend is UnquantizedMoeBackend.CPU
        ):
            kernels.append((method, method.moe_kernel))
            method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # received nothing: its weights are still packed
                method.moe_kernel = kernel
    for head in _tied_heads(model):
        head.quant_method.process_weights_after_loading(head)
    for module in model.modules():
        unpacked = getattr(getattr(module, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if unpacked is not None and hasattr(module, "conv_weights"):
            module.conv_weights.copy_(unpacked)


def _tied_heads(model: torch.nn.Module) -> list[ParallelLMHead]:
    found = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)
        and isinstance(module.quant_method, UnquantizedEmbeddingMethod)
    ]
    weights = {id(each.weight) for each in found if not isinstance(each, ParallelLMHead)}
    return [each for each in found if isinstance(each, ParallelLMHead) and id(each.weight) in weights]
