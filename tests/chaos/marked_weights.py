"""A model whose every token tells which weights made it.

Weights have a *mark*, a number. The model of mark m answers the token `token_of(m)`, whatever it is asked. It
answers `MIXED` as soon as any of its parts is of another mark: the embedding points into a direction of the
mark, attention averages the directions of all positions (so a cached value of other weights is seen), and the
output layer takes any other direction for `MIXED`.
"""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from tests.tiny_models import save_tokenizer, tiny_llama

MIXED = 2
DIRECTIONS = 64
HEAD = 32  # wide; vLLM's attention on CPUs knows no smaller ones
_FIRST, _TOKENS = 3, 200
_SEEN = 1e4  # one cached position of hundreds outweighs all others


def token_of(mark: int) -> int:
    """The token that weights of this mark answer."""
    return _FIRST + mark % _TOKENS


def tensors(mark: int) -> dict[str, torch.Tensor]:
    """The weights of a mark, by checkpoint name."""
    direction, turn = mark % DIRECTIONS, mark % HEAD
    made = {
        name: torch.zeros_like(parameter) for name, parameter in tiny_llama(0, layers=1).named_parameters()
    }
    for name in made:
        if name.endswith("norm.weight"):
            made[name].fill_(1.0)
    made["model.embed_tokens.weight"][:, direction] = 1.0
    value = made["model.layers.0.self_attn.v_proj.weight"]  # two key-value heads
    output = made["model.layers.0.self_attn.o_proj.weight"]  # heads 0 and 2 read them
    for index in range(DIRECTIONS):
        head, place = divmod(index, HEAD)
        turned = (place + turn) % HEAD
        value[head * HEAD + turned, index] = 1.0
        output[index, 2 * head * HEAD + turned] = 1.0
    head = made["lm_head.weight"]
    head[MIXED] = _SEEN
    head[MIXED, direction] = 0.0
    head[token_of(mark), direction] = 1.0
    return made


def marked_model(mark: int) -> LlamaForCausalLM:
    """The model of a mark."""
    model = tiny_llama(0, layers=1)
    model.load_state_dict(tensors(mark))
    return model


def save_marked(directory: Path, mark: int) -> Path:
    """A checkpoint directory of a mark, with a tokenizer."""
    marked_model(mark).save_pretrained(directory)
    save_tokenizer(directory)
    return directory
