"""Small models of vLLM's families, each with its shadow, and what was found.

In a process of its own: vLLM's parallel state and current configuration are global.
"""

import traceback
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, GptOssConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.base_loader import _has_online_quant
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention import selector

from deployments.weights.staging.derived import Derived
from deployments.weights.staging.observation import changed, observe
from deployments.weights.staging.pairs import pair
from deployments.weights.staging.reachable import path_name
from deployments.weights.staging.shadow_model import build_shadow

AMX = torch.cpu._is_amx_tile_supported()

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MLA: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KV_SCALES: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"},
}

FAMILIES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {  # experts first: vLLM makes their group then
    "experts": (Qwen3MoeConfig(**SMALL, head_dim=32, **EXPERTS, architectures=["Qwen3MoeForCausalLM"]), {}),
    "dense": (Qwen3Config(**SMALL, head_dim=32, architectures=["Qwen3ForCausalLM"]), {}),
    "mla": (DeepseekV3Config(**SMALL, **MLA, architectures=["DeepseekV3ForCausalLM"]), {}),
    "gpt-oss": (
        GptOssConfig(
            **SMALL,
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            architectures=["GptOssForCausalLM"],
        ),
        {},
    ),
    "kv-scales": (
        Qwen3Config(**SMALL, head_dim=32, architectures=["Qwen3ForCausalLM"], quantization_config=KV_SCALES),
        {"kv_cache_dtype": "fp8"},
    ),
    "compiled": (
        Qwen3Config(**SMALL, head_dim=32, architectures=["Qwen3ForCausalLM"]),
        {"enforce_eager": False, "compilation_config": {"mode": 3}},
    ),
}
# Kernels for GPUs exist for the sizes of real models only.
MLA_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
}
LARGER: dict[str, Any] = {**SMALL, "hidden_size": 256, "intermediate_size": 256}

GPU_FAMILIES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    **FAMILIES,
    "mla": (DeepseekV3Config(**SMALL, **{**MLA, **MLA_SIZES}, architectures=["DeepseekV3ForCausalLM"]), {}),
    "mxfp4": (
        GptOssConfig(
            **LARGER,
            head_dim=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            architectures=["GptOssForCausalLM"],
            quantization_config=MXFP4,
        ),
        {},
    ),
    "fp8": (Qwen3Config(**LARGER, head_dim=64, architectures=["Qwen3ForCausalLM"]), {"quantization": "fp8"}),
    "fp8-experts": (
        Qwen3MoeConfig(
            **LARGER,
            head_dim=64,
            **{**EXPERTS, "moe_intermediate_size": 256},
            architectures=["Qwen3MoeForCausalLM"],
        ),
        {"quantization": "fp8"},
    ),
}


def has_onednn() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU; without, vLLM takes the kernels of torch."""
    try:
        _custom_ops.create_onednn_mm(torch.zeros(64, 64, dtype=torch.bfloat16).t(), 32)
    except RuntimeError:  # a CPU without AVX-512, as seen on an AMD EPYC
        return False
    return True


def use_kernels(kernels: str) -> None:
    """Let vLLM take these kernels, in this process.

    onednn: weights packed where only their address is to be seen. amx: weights packed into tensors, which
    closures and MLA's kernels hold. torch: weights as they are.
    """
    _custom_ops._supports_onednn = kernels != "torch"
    torch.cpu._is_amx_tile_supported = lambda: kernels == "amx"
    selector._cached_get_attn_backend.cache_clear()


def init_parallel_state(config: VllmConfig, rendezvous: Path, backend: str) -> None:
    if not torch.distributed.is_initialized():
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, backend)
            initialize_model_parallel(1, 1)


def use_neutral_norms() -> None:
    """As vLLM 0.33: the dummy weights of norms have one value, whatever the seed."""
    made = RMSNorm.__init__

    def init(norm: RMSNorm, *arguments: Any, **named: Any) -> None:
        made(norm, *arguments, **named)
        if isinstance(norm.weight, torch.nn.Parameter):
            norm.weight.dummy_weight_value = 1.0

    RMSNorm.__init__ = init


def load(model: torch.nn.Module, config: VllmConfig, device: torch.device) -> None:
    """Random weights through vLLM's own steps after loading."""
    if _has_online_quant(model):
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, config.model_config)
        finalize_layerwise_processing(model, config.model_config)
    else:
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.copy_(torch.rand(parameter.shape, generator=generator) * 0.1 + 0.01)
            elif parameter.itemsize == 1:
                parameter.data.random_(0, 100)
    process_weights_after_loading(model, config.model_config, device)


def build(config: VllmConfig, device: torch.device) -> torch.nn.Module:
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        with device:
            model = initialize_model(config).eval()
        load(model, config, device)
    return model


@torch.no_grad()
def inspected(config: VllmConfig, device: torch.device) -> dict[str, Any]:
    """What the shadow's construction found, and what is left behind by a swap to the shadow's state."""
    live = build(config, device)
    try:
        shadow = build_shadow(config, device, live)
    except ValueError as error:
        return {"refused": str(error)}
    pairs, derived = pair(live, shadow.model), Derived(live, shadow.model, shadow.moving, baked=False)
    derived.collect()
    pairs.copy_to_live()
    derived.swap()
    found, expected = observe(live), observe(shadow.model)
    behind = [
        *changed(found.tensors | found.parameters, expected.tensors | expected.parameters),
        *(path for path, number in found.numbers.items() if number != expected.numbers.get(path)),
    ]
    return {
        "layerwise": shadow.layerwise,
        "tensors": [path_name(path) for path in shadow.moving.tensors],
        "numbers": [path_name(path) for path in shadow.moving.numbers],
        "behind": [path_name(path) for path in behind],
    }


def inspect_families(directory: Path, kernels: str) -> dict[str, dict[str, Any]]:
    """By family, with kernels for a CPU or with `cuda`."""
    on_cpu = kernels != "cuda"
    use_neutral_norms()
    if on_cpu:
        use_kernels(kernels)
    results: dict[str, dict[str, Any]] = {}
    for name, (description, arguments) in (FAMILIES if on_cpu else GPU_FAMILIES).items():
        target = directory / name
        description.save_pretrained(target)
        config = EngineArgs(
            model=str(target),
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=64,
            **{"enforce_eager": True, **arguments},
        ).create_engine_config()
        init_parallel_state(config, directory / "rendezvous", "gloo" if on_cpu else "nccl")
        try:
            results[name] = inspected(config, torch.device("cpu" if on_cpu else "cuda:0"))
        except Exception as error:  # whatever it is: the other families are to be seen as well
            traceback.print_exc()
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
    return results
