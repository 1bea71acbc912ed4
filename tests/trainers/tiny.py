"""Models of a few thousand parameters, one for each way of holding weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.made_once import made_once
from trainers.batching import TokenBatch, collate
from trainers.learner import Learner
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import Trajectory, VersionSpan

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
_VISION |= {"out_hidden_size": 16}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def model(kind: str, seed: int = 0, **changed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = SIZES | changed
    match kind:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
        case "llama-tied":
            return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**sizes))
        case "qwen3-moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**experts | sizes))
        case "qwen3.5":
            linear = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
            linear |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
            kinds = ["linear_attention", "full_attention"]
            return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **linear, layer_types=kinds))
        case "qwen3-vl":  # its text part says nothing of ties
            vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
            text = {**sizes, "rope_parameters": _ROPE}
            return Qwen3VLForConditionalGeneration(
                Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
            )
        case "qwen2.5-vl":
            vision = {**_VISION, "fullatt_block_indexes": [0]}
            text = {**sizes, "rope_parameters": _ROPE}
            return Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
            )
    raise ValueError(kind)


_OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama-tied", "qwen3", "qwen3-moe")]
KINDS = ("llama", *_OTHERS)
# Whole models: they have no causal model of the language part.
SEEING = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3-vl", "qwen2.5-vl")]


@made_once
def save(directory: Path, kind: str, seed: int = 0, **changed: int) -> Path:
    model(kind, seed, **changed).save_pretrained(directory)
    return directory


def policy(directory: Path, kind: str = "llama", seed: int = 0) -> TrainedPolicy:
    return TrainedPolicy.load(save(directory, kind, seed))


def batch(tokens: list[int]) -> TokenBatch:
    """Of one trajectory; the prompt is the first two tokens."""
    made = trajectory(tuple(tokens[:2]), tuple(tokens[2:]))
    return collate([made], [(0,)], pad_token_id=0, device=torch.device("cpu"))


def trajectory(
    prompt: tuple[int, ...],
    answer: tuple[int, ...],
    *,
    advantage: float = 1.0,
    logprobs: tuple[float, ...] | None = None,
    version: int | None = None,
) -> Trajectory:
    span = () if version is None else (VersionSpan(version=version, start=0, end=len(answer)),)
    return Trajectory(
        prompt_token_ids=prompt,
        token_ids=answer,
        logprobs=logprobs if logprobs is not None else (-1.0,) * len(answer),
        advantage=advantage,
        weight_versions=span,
    )


BATCH = [
    trajectory((3, 4), (5, 6, 1), advantage=1.0),
    trajectory((3, 4), (7, 1), advantage=-1.0),
    trajectory((8, 9, 10), (11, 12, 13), advantage=0.5),
]


def trained(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    """A copy of what it learns, by name."""
    return {name: tensor.detach().clone() for name, tensor in policy.trained().items()}


def equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def kept_by_a_step(learner: Learner, batch: Sequence[Trajectory]) -> int:
    """Bytes that autograd keeps for the backward pass, with those that it keeps in recomputing."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner.step(batch)
    return kept
