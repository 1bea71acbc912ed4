"""The model of the chaos tests shows what it claims to show."""

import pytest
import torch
from transformers import DynamicCache

from tests.chaos.marked_weights import MIXED, marked_model, tensors, token_of

PROMPT = torch.tensor([list(range(10, 200))])


def answer(model: torch.nn.Module) -> list[int]:
    made = model.generate(PROMPT, max_new_tokens=4, do_sample=False, eos_token_id=None)
    return [int(token) for token in made[0, PROMPT.shape[1] :]]


@pytest.mark.parametrize("mark", [0, 1, 31, 32, 63, 64, 199])
def test_each_token_is_that_of_the_mark(mark: int) -> None:
    assert answer(marked_model(mark)) == [token_of(mark)] * 4


@pytest.mark.parametrize(
    "part",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "lm_head.weight",
    ],
)
def test_a_part_of_other_weights_is_seen(part: str) -> None:
    model = marked_model(7)
    model.load_state_dict({**tensors(7), part: tensors(8)[part]})
    assert answer(model)[0] == MIXED


def test_one_cached_position_of_other_weights_is_seen() -> None:
    cache = DynamicCache()
    with torch.no_grad():
        marked_model(7)(PROMPT[:, :1], past_key_values=cache)
        logits = marked_model(8)(PROMPT[:, 1:], past_key_values=cache).logits
    assert int(logits[0, -1].argmax()) == MIXED
