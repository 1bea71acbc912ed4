"""Decoder layers: compilation, and what is kept for the backward pass.

False          everything that the backward pass reads
True           the layer's input
"selective"    what is expensive to recompute: chosen by the partitioner of compiled layers, else results of
               matrix products and attention
"""

from functools import partial
from typing import Any

import torch
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from trainers.settings import Checkpointing

MEMORY_BUDGET = 0.5  # 1 keeps all that saves work, 0 a layer's input only

_aten = torch.ops.aten
_EXPENSIVE = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All `layers` lists. Raises ValueError if there is none."""
    layers = [
        layer
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.rpartition(".")[2] == "layers"
        for layer in module
    ]
    if not layers:
        raise ValueError(f"expected a model with a ModuleList named 'layers', got {type(model).__name__}")
    return layers


def prepare_layers(model: PreTrainedModel, kept: Checkpointing, *, compiled: bool) -> bool:
    """Checkpoint and compile each layer; returns whether checkpointing needs train(). Raises ValueError."""
    by_compiler = compiled and kept == "selective"
    if compiled:
        for layer in decoder_layers(model):
            layer.compile(backend=_within_budget if by_compiler else "inductor")
    if by_compiler or not kept:
        return False
    arguments: dict[str, Any] = {"use_reentrant": False}
    if kept == "selective":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _EXPENSIVE)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    return True


def with_input_gradients(model: PreTrainedModel) -> None:
    """With frozen embeddings torch would compile the first layer separately."""

    def hook(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            output.requires_grad_(True)

    model.get_input_embeddings().register_forward_hook(hook)


def _within_budget(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
    with functorch.patch(activation_memory_budget=MEMORY_BUDGET):
        return lookup_backend("inductor")(graph, inputs, **options)
