"""Real vLLM models on a CPU, swapped from one checkpoint to another: what differs from a fresh load.

In a process of its own: vLLM's parallel state and current configuration are global.
"""

import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model

from deployments.weights.staging.base import Staging
from deployments.weights.staging.cpu_shadow import cpu_shadow_staging
from deployments.weights.staging.host import HostStaging
from deployments.weights.staging.model_state.observation import observe
from deployments.weights.staging.model_state.reachable import name_of
from deployments.weights.wire.chunk_layout import plan_chunks
from tests.deployments.weights.staging.cpu_kernels import use_kernels
from tests.deployments.weights.staging.families import EXPERTS, FAMILIES, MLA, SMALL

_EXPERTS_TO_PAD = {**EXPERTS, "moe_intermediate_size": 48}
_TIED = {**SMALL, "tie_word_embeddings": True}
HOST_FAMILIES: dict[str, PretrainedConfig] = {
    "experts-lora": FAMILIES["experts"][0],
    **{name: FAMILIES[name][0] for name in ("experts", "dense", "gpt-oss")},
    "mla": DeepseekV3Config(**SMALL, **MLA, topk_method="noaux_tc", architectures=["DeepseekV3ForCausalLM"]),
    "padded-experts": Qwen3MoeConfig(
        **SMALL, head_dim=32, **_EXPERTS_TO_PAD, architectures=["Qwen3MoeForCausalLM"]
    ),
    "tied": Qwen3Config(**_TIED, head_dim=32, architectures=["Qwen3ForCausalLM"]),
    "tied-twice": Qwen3Config(**_TIED, head_dim=32, architectures=["Qwen3ForCausalLM"]),
    "dense-lora": FAMILIES["dense"][0],
}


def save_checkpoint(directory: Path, family: str, seed: int) -> dict[str, torch.Tensor]:
    """One version of a family; returns its tensors by name."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(HOST_FAMILIES[family]).save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {name: t + 0.05 * torch.randn_like(t) for name, t in load_file(file).items()}
    if family == "tied-twice":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def configure(directory: Path, *, lora: bool) -> VllmConfig:
    return EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        max_model_len=64,
        enforce_eager=True,
        enable_lora=lora,
        max_lora_rank=8,
    ).create_engine_config()


def load(config: VllmConfig) -> torch.nn.Module:
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
        if config.lora_config is None:
            return model
        manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
        wrapped: torch.nn.Module = manager.create_lora_manager(model, config)
        return wrapped


def differing(swapped: torch.nn.Module, fresh: torch.nn.Module) -> list[str]:
    """What the two compute with and does not have the same content."""
    found, expected = observe(swapped), observe(fresh)
    tensors = found.tensors | found.buffers | found.parameters
    others = expected.tensors | expected.buffers | expected.parameters
    names = [name_of(way) for way in tensors.keys() ^ others.keys()]
    names += [name_of(way) for way in tensors.keys() & others.keys() if tensors[way].differs(others[way])]
    names += [name_of(way) for way, n in found.numbers.items() if expected.numbers.get(way, n) != n]
    # Where oneDNN packed a weight only its address is to be seen: what it computes is compared below.
    # What LoRA keeps of a batch is filled before it is read.
    names = [name for name in names if not name.startswith("lora_manager.punica_wrapper_mapping[")]
    return sorted(name for name in names if "handler_tensor" not in name) + computing_otherwise(
        swapped, fresh
    )


def computing_otherwise(swapped: torch.nn.Module, fresh: torch.nn.Module) -> list[str]:
    """The linear layers that answer the same input in another way."""
    others = dict(fresh.named_modules())
    names = []
    for name, layer in swapped.named_modules():
        linear = getattr(layer, "cpu_linear", None)
        if linear is None or (linear is torch.nn.functional.linear and not layer.weight.numel()):
            continue  # of MLA, packed for AMX elsewhere: never called
        embedding = isinstance(layer, VocabParallelEmbedding)
        width = layer.embedding_dim if embedding else layer.input_size
        given = torch.ones(1, width, dtype=torch.bfloat16 if embedding else layer.params_dtype)
        answers = [each.cpu_linear(given, each.weight, None) for each in (layer, others[name])]
        if not torch.equal(*answers):
            names.append(f"{name}.cpu_linear()")
    return names


def new_staging(kind: str, config: VllmConfig, live: torch.nn.Module) -> Staging:
    if kind == "host":
        return HostStaging(live, config.model_config)
    return cpu_shadow_staging(config, live)


@torch.no_grad()
def swap(staging: Staging, config: VllmConfig, tensors: dict[str, torch.Tensor]) -> None:
    staging.begin()
    for chunk in plan_chunks([(name, t.dtype, t.shape) for name, t in tensors.items()], 1 << 14):
        staging.add(chunk, [(entry.name, tensors[entry.name]) for entry in chunk.entries])
    unfilled = staging.finalize(complete=True, rest=lambda: None)
    assert not unfilled, unfilled
    with set_current_vllm_config(config), torch.inference_mode():
        staging.swap()
    staging.retire()


def swapped_twice(directory: Path, family: str, kind: str) -> dict[str, Any]:
    """Differences after a first swap, and after a second one."""
    save_checkpoint(directory / "a", family, 1)
    lora = family.endswith("-lora")
    config = configure(directory / "a", lora=lora)
    if not torch.distributed.is_initialized():
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{directory / 'rendezvous'}", 0, "gloo")
            initialize_model_parallel(1, 1)
    live = load(config)
    behind = []
    try:
        staging = new_staging(kind, config, live)
    except ValueError as error:
        return {"refused": str(error)}
    for seed, name in ((2, "b"), (3, "c")):
        tensors = save_checkpoint(directory / name, family, seed)
        try:
            swap(staging, config, tensors)
        except ValueError as error:
            return {"refused": str(error)}
        behind.append(differing(live, load(configure(directory / name, lora=lora))))
    result: dict[str, Any] = {"behind": behind}
    if family == "tied-twice":
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
        try:
            swap(staging, config, tensors)
        except ValueError as error:
            result["refused"] = str(error)
            result["behind after"] = differing(live, load(configure(directory / "c", lora=lora)))
    return result


def swap_all(directory: Path, kind: str, kernels: str) -> list[dict[str, Any]]:
    """Each family, with the staging `host` or `shadow`."""
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker on a CPU
    use_kernels(kernels)
    results = []
    for family in HOST_FAMILIES:
        if family.endswith("-lora") and kernels == "torch":
            continue  # the same modules, wrapped
        try:
            found = swapped_twice(directory / family, family, kind)
        except Exception as error:  # whatever it is: the other families are to be seen as well
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"}
        results.append({"family": family, **found})
    return results
