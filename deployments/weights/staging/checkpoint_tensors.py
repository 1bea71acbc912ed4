"""The tensors of a checkpoint, as vLLM's own loader reads them."""

from collections.abc import Iterable
from typing import cast

import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model_loader


def checkpoint_tensors(
    vllm_config: VllmConfig, model: torch.nn.Module, path: str
) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of a directory by checkpoint name, one after the other. As in vLLM's own reload, the
    model's configuration names this directory from then on.

    Raises:
        ValueError: the engine's load format has no files.
    """
    loader = get_model_loader(vllm_config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise ValueError(
            f"a checkpoint cannot be loaded with load_format {vllm_config.load_config.load_format!r}"
        )
    model_config = vllm_config.model_config
    # The other two belong to what the engine was loaded from.
    model_config.model, model_config.model_weights, model_config.revision = path, "", None
    return cast("Iterable[tuple[str, torch.Tensor]]", loader.get_all_weights(model_config, model))
