"""LoRA adapters of the tiny models, in the files that peft writes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def tiny_adapter_tensors(
    seed: int, *, rank: int = 4, layers: int = 2, width: int = 128, scale: float = 0.5
) -> dict[str, torch.Tensor]:
    """Of `tiny_models.tiny_llama`: so large that it answers differently."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.v_proj": (width // 2, width),
        "mlp.down_proj": (width, 2 * width),
    }
    tensors = {}
    for layer in range(layers):
        for module in MODULES:
            out, into = shapes[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, into, generator=generator) * scale
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * scale
    return tensors


def save_tiny_adapter(
    directory: Path,
    seed: int,
    *,
    rank: int = 4,
    tensors: dict[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = tiny_adapter_tensors(seed, rank=rank) if tensors is None else tensors
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [module.rsplit(".", 1)[1] for module in MODULES],
        "bias": "none",
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(written))
    return directory
