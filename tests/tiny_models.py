"""Models small enough that an engine starts in seconds and answers in milliseconds."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_tokenizer(directory: Path) -> int:
    """A byte-level tokenizer without merges; returns its vocabulary size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1} | {byte: index + 2 for index, byte in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return len(vocabulary)


def tiny_llama(
    seed: int,
    *,
    tied: bool = False,
    heads: int = 4,
    layers: int = 2,
    width: int = 128,
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """Few layers; weights so large that different seeds answer differently.

    Four heads are 32 wide: vLLM's attention on CPUs knows no smaller ones.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
        dtype=dtype,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def save_tiny_llama(
    directory: Path,
    seed: int,
    *,
    tied: bool = False,
    heads: int = 4,
    layers: int = 2,
    width: int = 128,
    dtype: torch.dtype = torch.float32,
) -> Path:
    model = tiny_llama(seed, tied=tied, heads=heads, layers=layers, width=width, dtype=dtype)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_tiny_experts(directory: Path, seed: int, *, dtype: torch.dtype = torch.float32) -> Path:
    """A mixture of eight experts, of which each token takes two.

    Two, so that the sum of what experts on different devices answer does not depend on its order.
    """
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=258,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
        dtype=dtype,
    )
    Qwen3MoeForCausalLM(config).to(dtype).eval().save_pretrained(directory)
    save_tokenizer(directory)
    return directory
