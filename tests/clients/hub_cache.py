"""A Hugging Face cache with a tiny model under the name of a real one, which a program names itself."""

from pathlib import Path

import torch
from transformers import OPTConfig, OPTForCausalLM

from tests.tiny_models import save_tokenizer

REVISION = "0" * 40


def save_tiny_opt(directory: Path, seed: int, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Two layers; its output embedding is its input embedding, as in every OPT."""
    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=save_tokenizer(directory),
        hidden_size=128,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        word_embed_proj_dim=128,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        init_std=0.3,
        dtype=dtype,
    )
    OPTForCausalLM(config).to(dtype).eval().save_pretrained(directory)
    return directory


def cached(home: Path, name: str) -> Path:
    """Where the only revision of a model has to be below `HF_HOME`."""
    model = home / "hub" / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    snapshot = model / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    return snapshot


if __name__ == "__main__":
    import sys

    print(save_tiny_opt(cached(Path(sys.argv[1]), sys.argv[2]), seed=5))
