from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
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
from trainers.output_head import OutputHead, logits_at

INPUTS = {
    "input_ids": torch.tensor([[0, 3, 4, 5, 6], [7, 8, 9, 10, 11]]),
    "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
    "position_ids": torch.tensor([[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]),
}
TARGETS = torch.tensor([4, 5, 6, 1, 8])
FAMILIES = ["llama", "llama-tied", "qwen3", "qwen3-moe", "gemma2", "granite", "cohere2", "gpt-oss", "no head"]
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


def test_the_output_matrix_is_applied_to_no_other_position() -> None:
    seen: list[tuple[int, ...]] = []
    llama = model("llama")
    llama.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
    assert logits_at(llama, POSITIONS, **INPUTS).shape == (5, 40)
    assert seen == [(1, 5, 40)]
    assert llama(**INPUTS).logits.shape == (2, 5, 40), "the model is as it was"


CASES: list[Any] = [(family, 3 * 40, False) for family in FAMILIES]
CASES += [("granite", 1, False), ("granite", 1000, False), ("llama", 3 * 40, True)]
CASES += [pytest.param("granite", 3 * 40, True, marks=pytest.mark.long)]


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first compilation starts torch's compilers
@pytest.mark.parametrize(("family", "at_once", "compiled"), CASES)  # one position at a time, three, all
def test_scores_and_their_gradients_are_those_of_the_whole_model(
    family: str, at_once: int, compiled: bool
) -> None:
    one, other = model(family).eval(), model(family).eval()
    logits = one(**INPUTS).logits.flatten(0, 1)[POSITIONS].float()
    expected = logits.log_softmax(-1).gather(-1, TARGETS[:, None])[:, 0]
    head = OutputHead(other, at_once=at_once, compiled=compiled)
    scores = head.scores(POSITIONS, TARGETS, with_entropies=True, **INPUTS)
    assert scores.entropies is not None and not scores.entropies.requires_grad
    torch.testing.assert_close(scores.logprobs, expected)
    torch.testing.assert_close(scores.entropies, torch.distributions.Categorical(logits=logits).entropy())
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (scores.logprobs * weights).sum().backward()
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)
    assert len(scores.entropies) == 5, "the backward pass computes none again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "at_once", "compiled"), [("llama", 3 * 40, False), ("granite", 1, False), ("llama", 80, True)]
)
def test_other_tokens_are_scored_in_the_same_pass(family: str, at_once: int, compiled: bool) -> None:
    one, other = model(family).eval(), model(family).eval()
    others = torch.stack([torch.randperm(40)[:3] for _ in TARGETS])
    asked = torch.cat([TARGETS[:, None], others], dim=1)
    logits = one(**INPUTS).logits.flatten(0, 1)[POSITIONS].float()
    expected = logits.log_softmax(-1).gather(-1, asked)
    head = OutputHead(other, at_once=at_once, compiled=compiled)
    scores = head.scores(POSITIONS, TARGETS, others=others, **INPUTS)
    assert scores.others is not None
    found, weights = torch.cat([scores.logprobs[:, None], scores.others], dim=1), torch.randn_like(expected)
    torch.testing.assert_close(found, expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


@pytest.mark.parametrize(("at_once", "largest"), [(1, 1), (80, 2), (1000, 5)])
def test_logits_are_made_of_few_positions_at_a_time(at_once: int, largest: int) -> None:
    llama = model("llama")
    kept: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    head = OutputHead(llama, at_once=at_once)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head.scores(POSITIONS, TARGETS, **INPUTS).logprobs.sum().backward()
    of_logits = [shape for shape in kept if shape[-1:] == (40,)]
    assert not of_logits or largest == 5, "a checkpointed part keeps none"
    assert llama(**INPUTS).logits.shape == (2, 5, 40), "the model is as it was"


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere2", "no head"])
def test_a_model_that_changes_what_its_output_layer_returns_is_found(family: str) -> None:
    changed = model(family).eval()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.zero_()  # logits are 0 then, scaled and capped or not
    head = OutputHead(changed, at_once=1)
    head.scores(POSITIONS, TARGETS, **INPUTS)
    assert head._is_last is False


def test_a_model_whose_tokens_see_those_after_them_is_refused() -> None:
    encoder = BertLMHeadModel(BertConfig(**tiny.SIZES)).eval()
    with pytest.raises(ValueError, match="expected a causal model, got BertLMHeadModel"):
        OutputHead(encoder).scores(POSITIONS, TARGETS, **INPUTS)


def test_a_layer_that_is_wrapped_already_stays_so() -> None:
    llama = model("llama")
    own, calls = llama.lm_head.forward, []

    def wrapped(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        result: torch.Tensor = own(hidden)
        return result

    vars(llama.lm_head)["forward"] = wrapped
    head = OutputHead(llama)
    head.scores(POSITIONS, TARGETS, **INPUTS)
    assert calls == [5], "once, with the chosen positions"
    assert llama.lm_head.forward is wrapped
