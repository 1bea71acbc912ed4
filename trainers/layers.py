"""The decoder layers of a model: which they are, what is compiled, and what is kept for the backward pass.

Activation checkpointing says what of each layer is kept from the forward pass:

    False          everything that the backward pass reads
    True           the layer's input; the backward pass runs the layer again
    "selective"    what is dear to compute again; the rest is computed again

What is dear is torch's to say: with compiled layers its partitioner chooses within a budget of memory
(`activation_memory_budget`), and otherwise the results of matrix products and attention are kept
(`torch.utils.checkpoint.create_selective_checkpoint_contexts`).
"""

from functools import partial
from typing import Any

import torch
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from trainers.settings import Checkpointing

MEMORY_BUDGET = 0.5  # 1: all that saves work is kept, 0: a layer's input alone

_aten = torch.ops.aten
_DEAR = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of every `layers` list.

    Raises:
        ValueError: the model has no list of layers.
    """
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
    """Checkpoint each layer, and torch.compile it; whether it must be in train() to be checkpointed.

    Raises:
        ValueError: the model's layers cannot be checkpointed, or not be compiled.
    """
    by_compiler = compiled and kept == "selective"
    if compiled:
        for layer in decoder_layers(model):
            layer.compile(backend=_within_budget if by_compiler else "inductor")
    if by_compiler or not kept:
        return False
    arguments: dict[str, Any] = {"use_reentrant": False}
    if kept == "selective":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _DEAR)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    return True


def with_input_gradients(model: PreTrainedModel) -> None:
    """The first layer's input needs a gradient where that of the others does. Else torch would compile the
    first layer of a model with frozen embeddings by itself."""

    def hook(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            output.requires_grad_(True)

    model.get_input_embeddings().register_forward_hook(hook)


def _within_budget(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
    with functorch.patch(activation_memory_budget=MEMORY_BUDGET):
        return lookup_backend("inductor")(graph, inputs, **options)
