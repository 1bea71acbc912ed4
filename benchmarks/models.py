"""Models of real shapes with random weights: their outputs are noise, their size is real."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a model of the Qwen3 family."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0


SHAPES = {
    "0.6b": Shape(1024, 3072, 28, 16, 8),
    "1.7b": Shape(2048, 6144, 28, 16, 8),
    "8b": Shape(4096, 12288, 36, 32, 8),
    "moe": Shape(1024, 3072, 12, 16, 4, experts=64),
    "30b-a3b": Shape(2048, 6144, 48, 32, 4, experts=128),
}


def config(size: str, *, tied: bool = False) -> Any:
    """A transformers configuration of the Qwen3 family."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    shape = SHAPES[size]
    common: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": tied,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "dtype": "bfloat16",
    }
    if shape.experts:
        return Qwen3MoeConfig(
            **common,
            num_experts=shape.experts,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        )
    return Qwen3Config(**common)


def head_config(size: str) -> Any:
    """A configuration of an EAGLE-3 head for the model, with a draft vocabulary as published heads have."""
    from trainers.eagle3 import new_config

    return new_config(config(size), draft_vocabulary=32_000)


def random_model(size: str, seed: int, device: str, *, tied: bool = False, dtype: str = "bfloat16") -> Any:
    """A transformers model; the same weights for the same seed on the same kind of device."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config(size, tied=tied), dtype=getattr(torch, dtype)).eval()


def write_config(size: str, directory: Path, *, tied: bool = False) -> None:
    """Configuration and a byte-level tokenizer: enough for `load_format: dummy`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    chosen = config(size, tied=tied)
    chosen.architectures = ["Qwen3MoeForCausalLM" if SHAPES[size].experts else "Qwen3ForCausalLM"]
    chosen.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1, **{letter: 2 + i for i, letter in enumerate(alphabet)}}
    # Prompts never contain these, but random weights generate them, and each needs a text.
    vocabulary |= {f"word{i}": i for i in range(len(vocabulary), chosen.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        directory
    )


def config_directory(size: str, root: Path = Path("/tmp/slipstream-models")) -> Path:
    """A directory below `root` with what `write_config` writes."""
    directory = root / f"{size}-config"
    directory.mkdir(parents=True, exist_ok=True)
    write_config(size, directory)
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, help="write weights too; without it only the configuration")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    if arguments.seed is not None:
        made = random_model(arguments.size, arguments.seed, arguments.device, tied=arguments.tied)
        made.save_pretrained(arguments.directory, max_shard_size="4GB")
    write_config(arguments.size, arguments.directory, tied=arguments.tied)
