"""Reads a model's configuration, whose text part or whole has an attribute, or neither."""

from contextlib import suppress
from typing import Any

from transformers import PreTrainedConfig


def attribute(config: PreTrainedConfig, name: str, default: Any = None) -> Any:
    """From the text part, else the whole; `default` if neither has one value."""
    for part in (config.get_text_config(), config):
        with suppress(RuntimeError):  # it differs between layers (Gemma 4)
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


def needed(config: PreTrainedConfig, name: str) -> Any:
    """Raises ValueError if there is none."""
    value = attribute(config, name)
    if value is None:
        raise ValueError(f"expected a model whose configuration has {name!r}, got {config.model_type!r}")
    return value


def vocabulary_size(config: PreTrainedConfig) -> int:
    return int(needed(config, "vocab_size"))


def max_length(config: PreTrainedConfig) -> int | None:
    """In tokens; None: any length (Mamba, ALiBi)."""
    positions = int(attribute(config, "max_position_embeddings", 0))
    return positions if positions > 0 else None


def pad_token_id(config: PreTrainedConfig) -> int:
    """Any token: padding is masked everywhere."""
    return max(0, int(attribute(config, "pad_token_id", 0)))


def end_token_ids(config: PreTrainedConfig) -> list[int]:
    ends = attribute(config, "eos_token_id", [])
    return sorted(set(ends if isinstance(ends, list) else [ends]))


def attends_to_all(config: PreTrainedConfig) -> bool:
    """If so, a mask may restrict them."""
    if kinds := attribute(config, "layer_types"):
        return all(kind == "full_attention" for kind in kinds)
    return attribute(config, "sliding_window") is None
