"""Models small enough that an engine starts in seconds and answers in milliseconds."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.made_once import made_once
from trainers.fsdp2 import model_class

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


# What fits the tokenizer, and weights so large that different seeds answer differently.
SHARED: dict[str, Any] = {
    "vocab_size": 258,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


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
    """Few layers.

    Four heads are 32 wide: vLLM's attention on CPUs knows no smaller ones.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SHARED,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        tie_word_embeddings=tied,
        dtype=dtype,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@made_once
def save_tiny_llama(directory: Path, seed: int, **options: Any) -> Path:
    """Options: those of `tiny_llama`."""
    tiny_llama(seed, **options).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@made_once
def save_tiny_experts(
    directory: Path, seed: int, *, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Path:
    """A mixture of eight experts, of which each token takes two.

    Two, so that the sum of what experts on different devices answer does not depend on its order.
    """
    torch.manual_seed(seed)
    made: dict[str, Any] = {
        **SHARED,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    config = Qwen3MoeConfig(**made | sizes, norm_topk_prob=True, tie_word_embeddings=False, dtype=dtype)
    Qwen3MoeForCausalLM(config).to(dtype).eval().save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@made_once
def save_tiny_tied_twice(directory: Path, seed: int) -> Path:
    """Tied embeddings whose checkpoint stores `lm_head` beside them, and a rotary table, as old ones do."""
    save_tiny_llama(directory, seed, tied=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = frequencies.clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def add_mtp(directory: Path, depth: int) -> None:
    """A layer of multi-token prediction, which transformers leaves out, in the form of the family's
    checkpoints: with the weights of the model's last layer."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    if "qwen3" in json.loads((directory / "config.json").read_text())["model_type"]:
        layer, fused, first = "mtp.layers.0.", "mtp.fc", 0.0
        norms = [f"mtp.{name}" for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")]
    else:
        layer, fused, first = f"model.layers.{depth}.", f"model.layers.{depth}.eh_proj", 1.0
        norms = [f"{layer}{name}" for name in ("shared_head.norm", "enorm", "hnorm")]
        tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for name, tensor in list(tensors.items()):
        _, found, rest = name.partition(f".layers.{depth - 1}.")
        if found:
            tensors[layer + rest] = tensor.clone()
    width = tensors[f"{layer}input_layernorm.weight"].numel()
    tensors[f"{fused}.weight"] = torch.randn(width, 2 * width) * 0.1
    tensors |= {f"{norm}.weight": first + torch.randn(width) * 0.1 for norm in norms}
    save_file(tensors, file, metadata={"format": "pt"})


@made_once
def save_tiny_mtp(directory: Path, seed: int, family: str = "glm4_moe", **changed: Any) -> Path:
    """A mixture of experts with a layer of multi-token prediction."""
    changed = {"num_nextn_predict_layers": 1, "initializer_range": 0.3, **changed}
    save_tiny_family(directory, family, seed, **changed)
    add_mtp(directory, tiny_config(family, **changed).num_hidden_layers)
    save_tokenizer(directory)
    return directory


@made_once
def save_agreeing_mtp(directory: Path, seed: int, family: str = "glm4_moe", *, drafter: bool = True) -> Path:
    """As `save_tiny_mtp`, but each token alone says which one follows, and what drafts reads nothing but it:
    it drafts what the policy says, and what a policy of another seed says with whose embeddings it runs.
    `drafter` False: without it, as transformers saves the model."""
    save_tiny_mtp(directory, seed, family)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.mul_(1e-4)  # not zero, of which fp8 has no scale
    tensors["model.layers.2.eh_proj.weight"] = torch.eye(128, 256)
    order = torch.randperm(SHARED["vocab_size"], generator=torch.Generator().manual_seed(seed))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][
        order
    ]  # so clearly that no rounding matters
    kept = {name: each for name, each in tensors.items() if drafter or ".layers.2." not in name}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@made_once
def save_tiny_vision_language(directory: Path, seed: int, **changed: Any) -> Path:
    """A language model that also sees: transformers' causal model of it is the language part alone.

    `changed`: of the text's configuration.
    """
    torch.manual_seed(seed)
    text = {
        **SHARED,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "initializer_range": 0.1,
        "dtype": "float32",
        **changed,
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    Qwen3_5ForConditionalGeneration(config).eval().save_pretrained(directory)
    add_mtp(directory, config.text_config.num_hidden_layers)
    save_tokenizer(directory)
    return directory


_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_SEEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SEEING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@made_once
def save_tiny_seeing(directory: Path, family: str = "qwen3_vl", seed: int = 0) -> Path:
    """A vision-language model with its processor: 32 x 32 pixels are a token."""
    torch.manual_seed(seed)
    save_tokenizer(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SEEN)})
    tokenizer.chat_template = _SEEING_TEMPLATE
    tokenizer.save_pretrained(directory)
    made = tiny_config(family).to_dict()
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    made |= dict(zip(names, tokenizer.convert_tokens_to_ids(list(_SEEN)), strict=True))
    made["text_config"] |= {"vocab_size": len(tokenizer), "rope_parameters": _MROPE}
    if family != "qwen2_5_vl":
        made["text_config"]["rope_parameters"] = _MROPE | {
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        }
    made["vision_config"] |= {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    made["vision_config"] |= {"hidden_size": 64, "intermediate_size": 64, "num_position_embeddings": 16}
    if "deepstack_visual_indexes" in made["vision_config"]:
        made["vision_config"]["deepstack_visual_indexes"] = [0]
    config = CONFIG_MAPPING[family].from_dict(made)
    AutoModelForImageTextToText.from_config(config).eval().save_pretrained(directory)
    sizes = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    sizes |= {"size": {"shortest_edge": 1024, "longest_edge": 1 << 16}}
    sizes |= dict.fromkeys(("image_mean", "image_std"), [0.5] * 3)
    sizes["processor_class"] = "Qwen3VLProcessor"
    for name, kind in (
        ("preprocessor_config", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (directory / f"{name}.json").write_text(json.dumps(sizes | kind))
    return directory


# By an attribute's name, in any family. Heads are as wide as kernels ask for.
_SIZES: dict[str, Any] = {
    **{
        name: SHARED[name]
        for name in ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id")
    },
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
    "vocab_size_per_layer_input": 258,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    "num_experts_per_tok": 2,
    # Kernels of latent attention exist for the sizes of real models only.
    **{
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    **dict.fromkeys(("index_head_dim", "index_topk"), 128),
    "index_n_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    "linear_num_key_heads": 2,
    "mamba_d_ssm": 128,
    "n_groups": 1,
    **{
        "depth": 1,
        "num_heads": 2,
        "patch_size": 4,
        "image_size": 16,
        "out_hidden_size": 128,
        "embed_dim": 128,
    },
}
_ATTENTION = {"full_attention", "sliding_attention", "indexed_attention", "chunked_attention"}
_CONV = {"layer_types": ["conv", "full_attention"]}
_BIASED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # in checkpoints, and in no default
_WIDE = {"rope_parameters": _MROPE}
_NARROW = {"rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text"), _WIDE),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text"), _NARROW),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _BIASED),
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "route_scale": 1.0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gptj": {"rotary_dim": 16},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {**_BIASED, "first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "glm5_next_text": {"num_key_value_heads": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {**_CONV, "conv_dim": 128, "block_dim": 128},
    "lfm2_moe": {**_CONV, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
}


def tiny_config(family: str, **changed: Any) -> PreTrainedConfig:
    """The configuration of a family (`model_type`) with few of everything that its default has."""
    kind = CONFIG_MAPPING[family]
    changed |= {kind.attribute_map.get(name, name): value for name, value in changed.items()}
    made: PreTrainedConfig = kind(**_sizes(kind()) | changed)
    return made


def _sizes(default: PreTrainedConfig) -> dict[str, Any]:
    named = vars(default)
    made = {
        name: size
        for name, size in _SIZES.items()
        if name in named or name in type(default).attribute_map
        if isinstance(named.get(default.attribute_map.get(name, name)), int | float)
        or name in ("pad_token_id", "head_dim", "num_key_value_heads")
    }
    if "qk_rope_head_dim" in named:
        made["num_key_value_heads"] = made["num_attention_heads"]
    if "qk_rope_head_dim" in named or "_heterogeneity_spec" in named:
        made.pop("head_dim", None)
    if set(getattr(default, "layer_types", None) or ()) - _ATTENTION:
        made["num_hidden_layers"] = 4  # the last one attends
    if isinstance(rope := named.get("rope_parameters"), dict) and "mrope_section" in rope:
        made["rope_parameters"] = {**rope, "mrope_section": [4, 6, 6]}
    for name, part in named.items():
        if isinstance(part, PreTrainedConfig):
            made[name] = {"model_type": part.model_type, **_sizes(part)}
    return made | _OF_FAMILY.get(default.model_type, {})


@made_once
def save_tiny_family(directory: Path, family: str, seed: int = 0, **changed: Any) -> Path:
    """The class that the trainer loads. Raises what transformers does if it cannot be made so small."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changed)
    model_class(config).from_config(config).eval().save_pretrained(directory)
    return directory
