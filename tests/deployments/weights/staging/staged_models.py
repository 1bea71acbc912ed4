"""Rounds on real vLLM models, some of them dropped, and what differs from a fresh load after each.

In a process of its own: vLLM's parallel state and current configuration are global.
"""

import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from deployments.weights.staging import device, nan_poison
from deployments.weights.staging.base import Staging
from deployments.weights.staging.cpu_shadow import cpu_shadow_staging
from deployments.weights.staging.host import HostStaging, reload_refusal, replacing_all
from deployments.weights.staging.observation import Content, Observation, changed, observe, same
from deployments.weights.staging.reachable import AccessPath, path_name
from deployments.weights.wire.chunk_layout import describe, layout, pack, packed_chunk
from tests.deployments.weights.staging.families import (
    EXPERTS,
    FAMILIES,
    GPU_FAMILIES,
    MLA,
    MLA_SIZES,
    SMALL,
    init_parallel_state,
    use_kernels,
)
from tests.tiny_models import tiny_config

Tensors = dict[str, torch.Tensor]
Families = dict[str, tuple[PretrainedConfig, dict[str, Any]]]

_TIED = Qwen3Config(**{**SMALL, "tie_word_embeddings": True}, head_dim=32, architectures=["Qwen3ForCausalLM"])
_PADDED = {**EXPERTS, "moe_intermediate_size": 48}
_LORA = {"enable_lora": True, "max_lora_rank": 8}


def _mla(**arguments: Any) -> PretrainedConfig:
    return DeepseekV3Config(**SMALL, **{**MLA, **arguments}, architectures=["DeepseekV3ForCausalLM"])


_ON_CPU: Families = {  # experts first: vLLM makes their group then
    "experts-lora": (FAMILIES["experts"][0], _LORA),
    **{name: FAMILIES[name] for name in ("experts", "dense", "gpt-oss")},
    "mla": (_mla(topk_method="noaux_tc"), {}),
    "padded-experts": (
        Qwen3MoeConfig(**SMALL, head_dim=32, **_PADDED, architectures=["Qwen3MoeForCausalLM"]),
        {},
    ),
    "mamba": (tiny_config("mamba2", dtype="bfloat16"), {}),
    "tied": (_TIED, {}),
    "tied-twice": (_TIED, {}),
    "dense-lora": (FAMILIES["dense"][0], _LORA),
}
# No experts: on a CPU vLLM packs theirs only once, and `device` is not for that.
_WITHOUT_GPU: Families = {
    "dense": FAMILIES["dense"],
    "mla": (_mla(first_k_dense_replace=SMALL["num_hidden_layers"]), {}),
}
_ON_GPU: Families = {
    **{name: GPU_FAMILIES[name] for name in ("fp8-experts", "experts", "dense", "fp8")},
    "mla": (_mla(**MLA_SIZES, topk_method="noaux_tc"), {}),
}


class StagedModel:
    """One family: its checkpoints, the live model, and its staging.

    Raises:
        ValueError: this staging is not possible.
    """

    def __init__(self, directory: Path, kind: str, family: str, families: Families) -> None:
        self._directory, self._kind, self._family = directory, kind, family
        self._description, arguments = families[family]
        self._arguments = {"enforce_eager": True, **arguments}
        self._device = torch.device("cuda" if kind == "device" else "cpu")
        self.versions = {name: self._save(name, seed) for seed, name in enumerate("abc")}
        self._config = self._configure("a")
        init_parallel_state(self._config, directory / "rendezvous", "nccl" if kind == "device" else "gloo")
        self._live = self._load(self._config)
        self._staging = self._make_staging(kind)

    def _save(self, name: str, seed: int) -> Tensors:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(self._description).save_pretrained(self._directory / name)
        file = self._directory / name / "model.safetensors"
        tensors = {each: t + 0.05 * torch.randn_like(t) for each, t in load_file(file).items()}
        if self._family == "tied-twice":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, file, metadata={"format": "pt"})
        return tensors

    def _configure(self, name: str) -> VllmConfig:
        return EngineArgs(
            model=str(self._directory / name), skip_tokenizer_init=True, max_model_len=64, **self._arguments
        ).create_engine_config()

    def _load(self, config: VllmConfig) -> torch.nn.Module:
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config):
            model = get_model(vllm_config=config)
            if config.lora_config is None:
                return model
            manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
            wrapped: torch.nn.Module = manager.create_lora_manager(model, config)
            return wrapped

    def _make_staging(self, kind: str) -> Staging:
        if kind == "host":
            return HostStaging(self._live, self._config.model_config)
        if kind == "shadow":
            return cpu_shadow_staging(self._config, self._live)
        if kind == "without_gpu":
            return device_staging_without_gpu(self._config, self._live)
        return device.DeviceStaging(self._config, self._device, self._live)

    def stage(self, tensors: Tensors, *, finalize: bool = True) -> None:
        stage(self._staging, tensors, self._device, finalize=finalize)

    def drop(self) -> None:
        self._staging.drop()

    def swap(self) -> None:
        with set_current_vllm_config(self._config), torch.inference_mode():
            self._staging.swap()
        self._staging.retire()

    def loads(self) -> bool:
        """Whether it can be loaded from a checkpoint."""
        return self._kind == "device" or reload_refusal(self._live) is None

    def load(self, name: str) -> None:
        """As a replica does that catches up."""
        path = str(self._directory / name)
        with set_current_vllm_config(self._config):
            if self._staging.load(path):
                return
        with set_current_vllm_config(self._config), replacing_all(self._live):
            reload_weights(
                self._config, self._live, weights_iterator=None, weights_path=path, is_checkpoint_format=True
            )

    def behind(self, name: str) -> list[str]:
        """What differs from a fresh load."""
        fresh = self._load(self._configure(name))
        names = differing(self._live, fresh, self._kind)
        return names if self._device.type == "cuda" else names + computing_otherwise(self._live, fresh)


@torch.no_grad()
def stage(staging: Staging, tensors: Tensors, device: torch.device, *, finalize: bool = True) -> None:
    """As a worker does with what a publisher sends."""
    staging.begin()
    described = describe([(each, tensor.dtype, tensor.shape) for each, tensor in tensors.items()])
    for chunk in layout(*described.values(), 1 << 14):  # type: ignore[arg-type]
        block = torch.zeros(chunk.size_bytes, dtype=torch.uint8, device=device)
        pack(chunk, ((entry.name, tensors[entry.name]) for entry in chunk.entries), block)
        received = packed_chunk(chunk, block)
        if staging.replay(received) is None:
            staging.add(chunk, received.named())
    if finalize:
        unfilled = staging.finalize(complete=True, check_open=lambda: None)
        assert not unfilled, unfilled


def differing(live: torch.nn.Module, fresh: torch.nn.Module, kind: str) -> list[str]:
    """The paths of what one model holds otherwise than another, after staging of this kind."""
    found, expected = observe(live), observe(fresh)

    def tensors(seen: Observation) -> dict[AccessPath, Content]:
        # On a GPU some buffers are scratch memory.
        return (seen.tensors if kind == "device" else seen.derivable) | seen.parameters

    ours, theirs = tensors(found), tensors(expected)
    paths = changed(ours, theirs)
    paths += [
        path
        for path, number in found.numbers.items()
        if path in expected.numbers and not same(number, expected.numbers[path])
    ]
    if kind in ("host", "shadow"):
        paths += ours.keys() ^ theirs.keys()
    # Where oneDNN packed a weight, only its address can be compared. LoRA's batch tensors are written
    # before they are read. Kernels are warmed up by an engine alone.
    ignored = ("handler_tensor", "lora_manager.punica_wrapper_mapping[", "kernels_warmed_up")
    return sorted(name for name in map(path_name, paths) if not any(each in name for each in ignored))


def computing_otherwise(swapped: torch.nn.Module, fresh: torch.nn.Module) -> list[str]:
    """The linear layers that compute something else from the same input."""
    others = dict(fresh.named_modules())
    names = []
    for name, layer in swapped.named_modules():
        linear = getattr(layer, "cpu_linear", None)
        if linear is None or (linear is torch.nn.functional.linear and not layer.weight.numel()):
            continue  # MLA's, packed for AMX elsewhere: never called
        embedding = isinstance(layer, VocabParallelEmbedding)
        width = layer.embedding_dim if embedding else layer.input_size
        given = torch.ones(1, width, dtype=torch.bfloat16 if embedding else layer.params_dtype)
        computed = [each.cpu_linear(given, each.weight, None) for each in (layer, others[name])]
        if not torch.equal(*computed):
            names.append(f"{name}.cpu_linear()")
    return names


def rounds(model: StagedModel) -> dict[str, list[str]]:
    """What differs from a fresh load after each."""
    found = {}
    for step, dropped, finalize, name in (
        ("the first round", None, True, "b"),
        ("after a round that was dropped", "c", False, "a"),
        ("after a complete round that was dropped", "b", True, "c"),
    ):
        if dropped:
            model.stage(model.versions[dropped], finalize=finalize)
            model.drop()
        model.stage(model.versions[name])
        model.swap()
        found[step] = model.behind(name)
    if model.loads():
        model.load("b")
        found["a load from a checkpoint"] = model.behind("b")
    model.stage(model.versions["a"])
    model.swap()
    found["the last round"] = model.behind("a")
    return found


def _untied(model: StagedModel) -> dict[str, Any]:
    """A version whose output embedding differs, for an engine that has tied it."""
    tensors = dict(model.versions["a"])
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
    try:
        model.stage(tensors)
    except ValueError as error:
        return {"refused": str(error), "behind after": model.behind("a")}
    return {}


def stage_families(directory: Path, kind: str, kernels: str) -> dict[str, dict[str, Any]]:
    """Each family with the staging `host`, `shadow`, `device` or `without_gpu`: that of `device` on a CPU."""
    if kind != "device":
        torch.accelerator.empty_cache = lambda: None  # as vLLM's worker on a CPU
        use_kernels(kernels)
    families = {"device": _ON_GPU, "without_gpu": _WITHOUT_GPU}.get(kind, _ON_CPU)
    results: dict[str, dict[str, Any]] = {}
    for family in families:
        if family.endswith("-lora") and kernels == "torch":
            continue  # the same modules, wrapped
        (directory / family).mkdir()
        try:
            model = StagedModel(directory / family, kind, family, families)
            results[family] = {"behind": rounds(model)}
            if family == "tied-twice":
                results[family] |= _untied(model)
        except ValueError as error:
            results[family] = {"refused": str(error)}
        except Exception as error:  # whatever it is: the other families are to be seen as well
            traceback.print_exc()
            results[family] = {"failed": f"{type(error).__name__}: {error}"}
    return results


class _Queue:
    """A stream and an event, where everything is done at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _launch(self: nan_poison.NanPoison, found: torch.Tensor, *, SET: bool) -> None:
    for index, (shadow, _) in enumerate(self._parameters.values()):
        columns = nan_poison.outer_columns(shadow)
        if SET:
            columns.fill_(float("nan"))
        else:
            found[index] = columns.isnan().any()


def device_staging_without_gpu(config: VllmConfig, live: torch.nn.Module) -> device.DeviceStaging:
    """`DeviceStaging` on a CPU: what it does and in which order, without its streams. Changes torch and the
    module for good; Triton's kernel for the poison is written again in torch."""
    queue: Any = _Queue()
    changed: Any = torch.cuda
    changed.Event = changed.current_stream = lambda *_: queue
    changed.synchronize = lambda *_: None
    replaced: Any = device
    replaced.check_support = replaced.check_memory = replaced.warm_up = lambda *_: None
    nan_poison.NanPoison._launch = _launch  # type: ignore[method-assign]
    return device.DeviceStaging(config, torch.device("cpu"), live)
