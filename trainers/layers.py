"""The decoder layers of a model."""

import torch


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
