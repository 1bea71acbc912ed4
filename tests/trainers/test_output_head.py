from typing import Any

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.trainers import tiny
from trainers.output_head import logits_at

INPUTS = {
    "input_ids": torch.tensor([[0, 3, 4, 5, 6], [7, 8, 9, 10, 11]]),
    "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
    "position_ids": torch.tensor([[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]),
}
POSITIONS = torch.tensor([2, 3, 3, 9, 5])  # some twice, in no order


class _NamesNoHead(LlamaForCausalLM):
    def get_output_embeddings(self) -> None:
        return None


def model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    match family:
        case "gemma2":
            return Gemma2ForCausalLM(Gemma2Config(**tiny.SIZES, final_logit_softcapping=2.0))
        case "granite":
            return GraniteForCausalLM(GraniteConfig(**tiny.SIZES, logits_scaling=8.0))
        case "cohere2":
            return Cohere2ForCausalLM(Cohere2Config(**tiny.SIZES, logit_scale=0.25))
        case "gpt-oss":
            experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
            return GptOssForCausalLM(GptOssConfig(**tiny.SIZES, **experts))
        case "no head":
            return _NamesNoHead(LlamaConfig(**tiny.SIZES))
        case _:
            return tiny.model(family)


@pytest.mark.parametrize("family", [*tiny.KINDS, "gemma2", "granite", "cohere2", "gpt-oss", "no head"])
def test_chosen_logits_and_their_gradients_are_those_of_the_whole_model(family: str) -> None:
    one, other = model(family).eval(), model(family).eval()
    expected = one(**INPUTS).logits.flatten(0, 1)[POSITIONS]
    actual = logits_at(other, POSITIONS, **INPUTS)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_the_output_matrix_is_applied_to_no_other_position() -> None:
    seen: list[tuple[int, ...]] = []
    llama = model("llama")
    llama.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
    assert logits_at(llama, POSITIONS, **INPUTS).shape == (5, 40)
    assert seen == [(1, 5, 40)]
    assert llama(**INPUTS).logits.shape == (2, 5, 40), "the model is as it was"


def test_no_position_is_no_logit_and_a_gradient_of_zero() -> None:
    llama = model("llama")
    logits = logits_at(llama, torch.zeros(0, dtype=torch.int64), **INPUTS)
    assert logits.shape == (0, 40)
    logits.sum().backward()
    assert all(float(p.grad.abs().max()) == 0.0 for p in llama.parameters() if p.grad is not None)
