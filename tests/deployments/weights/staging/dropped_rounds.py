"""Rounds on real vLLM models, some of them dropped, and what differs from a fresh load.

In a process of its own: vLLM's parallel state and current configuration are global.
"""

import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from deployments.weights.staging.base import Staging
from deployments.weights.staging.host import HostStaging, replacing_all
from deployments.weights.staging.model_state.observation import changed, observe, same
from deployments.weights.staging.model_state.reachable import name_of
from deployments.weights.wire.chunk_layout import describe, layout, pack, packed_chunk
from tests.deployments.weights.staging.cpu_kernels import use_kernels
from tests.deployments.weights.staging.device_without_gpu import device_staging
from tests.deployments.weights.staging.families import FAMILIES, GPU_FAMILIES, MLA, MLA_SIZES, SMALL

Tensors = dict[str, torch.Tensor]

_MLA = DeepseekV3Config(
    **SMALL, **{**MLA, **MLA_SIZES}, topk_method="noaux_tc", architectures=["DeepseekV3ForCausalLM"]
)
_ON_CPU: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    name: FAMILIES[name] for name in ("experts", "dense")
}
# No experts: on a CPU vLLM packs theirs only once, and `device` is not for that.
_DENSE_MLA = {**MLA, "first_k_dense_replace": SMALL["num_hidden_layers"]}
_WITHOUT_GPU: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "dense": FAMILIES["dense"],
    "mla": (DeepseekV3Config(**SMALL, **_DENSE_MLA, architectures=["DeepseekV3ForCausalLM"]), {}),
}
_ON_GPU: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "fp8-experts": GPU_FAMILIES["fp8-experts"],  # experts first: vLLM makes their group then
    "experts": GPU_FAMILIES["experts"],
    "dense": GPU_FAMILIES["dense"],
    "mla": (_MLA, {}),
    "fp8": GPU_FAMILIES["fp8"],
}


class Scene:
    """One family: its checkpoints, the model that serves, and its staging."""

    def __init__(self, directory: Path, kind: str, description: PretrainedConfig, arguments: Any) -> None:
        self._directory, self._arguments = directory, {"enforce_eager": True, **arguments}
        self._device = torch.device("cuda" if kind == "device" else "cpu")
        self.versions: dict[str, Tensors] = {}
        for seed, name in enumerate("abc"):
            self.versions[name] = self._save(name, description, seed)
        self._config = self._configure("a")
        if not torch.distributed.is_initialized():
            backend = "nccl" if kind == "device" else "gloo"
            with set_current_vllm_config(self._config):
                init_distributed_environment(1, 0, f"file://{directory / 'rendezvous'}", 0, backend)
                initialize_model_parallel(1, 1)
        self._live = self._load(self._config)
        self._staging = self._make_staging(kind)

    def _save(self, name: str, description: PretrainedConfig, seed: int) -> Tensors:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(description).save_pretrained(self._directory / name)
        file = self._directory / name / "model.safetensors"
        tensors = {each: t + 0.05 * torch.randn_like(t) for each, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        return tensors

    def _configure(self, name: str) -> VllmConfig:
        return EngineArgs(
            model=str(self._directory / name), skip_tokenizer_init=True, max_model_len=64, **self._arguments
        ).create_engine_config()

    def _load(self, config: VllmConfig) -> torch.nn.Module:
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config):
            return get_model(vllm_config=config)

    def _make_staging(self, kind: str) -> Staging:
        if kind == "host":
            return HostStaging(self._live, self._config.model_config)
        if kind == "shadow":
            from deployments.weights.staging.cpu_shadow import cpu_shadow_staging

            return cpu_shadow_staging(self._config, self._live)
        if kind == "without_gpu":
            return device_staging(self._config, self._live)
        from deployments.weights.staging.device import DeviceStaging

        return DeviceStaging(self._config, self._device, self._live)

    @torch.no_grad()
    def stage(self, name: str, *, finalize: bool = True) -> None:
        tensors = self.versions[name]
        self._staging.begin()
        described = describe([(each, tensor.dtype, tensor.shape) for each, tensor in tensors.items()])
        for chunk in layout(*described.values(), 1 << 16):  # type: ignore[arg-type]
            block = torch.zeros(chunk.size_bytes, dtype=torch.uint8, device=self._device)
            pack(chunk, ((entry.name, tensors[entry.name]) for entry in chunk.entries), block)
            received = packed_chunk(chunk, block)
            if self._staging.replay(received) is None:
                self._staging.add(chunk, received.named())
        if finalize:
            unfilled = self._staging.finalize(complete=True, rest=lambda: None)
            assert not unfilled, unfilled

    def drop(self) -> None:
        self._staging.drop()

    def swap(self) -> None:
        with set_current_vllm_config(self._config), torch.inference_mode():
            self._staging.swap()
        self._staging.retire()

    def load(self, name: str) -> None:
        """As a replica does that catches up."""
        path = str(self._directory / name)
        with set_current_vllm_config(self._config):
            if self._staging.load(path):
                return
        with set_current_vllm_config(self._config), replacing_all(self._live):
            reload_weights(
                self._config,
                self._live,
                weights_iterator=None,
                weights_path=path,
                is_checkpoint_format=True,
            )

    def behind(self, name: str) -> list[str]:
        """What differs from a fresh load."""
        fresh = self._load(self._configure(name))
        found, expected = observe(self._live), observe(fresh)
        names = changed(found.tensors | found.parameters, expected.tensors | expected.parameters)
        names += [
            way
            for way, number in found.numbers.items()
            if way in expected.numbers and not same(number, expected.numbers[way])
        ]
        if self._device.type == "cuda":
            return sorted(map(name_of, names))
        from tests.deployments.weights.staging.host_families import computing_otherwise

        # Where oneDNN packed a weight, which depends on the host's CPU, only its address is to be seen.
        seen = [name for name in map(name_of, names) if "handler_tensor" not in name]
        return sorted(seen) + computing_otherwise(self._live, fresh)


def outcomes(scene: Scene) -> dict[str, list[str]]:
    found = {}
    scene.stage("b")
    scene.swap()
    found["the first round"] = scene.behind("b")
    scene.stage("c", finalize=False)
    scene.drop()
    scene.stage("a")
    scene.swap()
    found["after a round that was dropped"] = scene.behind("a")
    scene.stage("b")
    scene.drop()
    scene.stage("c")
    scene.swap()
    found["after a round that was dropped when it was complete"] = scene.behind("c")
    scene.load("b")
    found["a load from a checkpoint"] = scene.behind("b")
    scene.stage("a")
    scene.swap()
    found["after a load from a checkpoint"] = scene.behind("a")
    return found


def drop_rounds(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Each family with the staging `host`, `shadow`, `device` or `without_gpu`: that of `device` on a CPU."""
    results = []
    if kind != "device":
        torch.accelerator.empty_cache = lambda: None  # as vLLM's worker on a CPU
    if kind == "without_gpu":
        use_kernels("torch")
    families = {"device": _ON_GPU, "without_gpu": _WITHOUT_GPU}.get(kind, _ON_CPU)
    for family, (description, arguments) in families.items():
        try:
            (directory / family).mkdir()
            found: dict[str, Any] = {
                "behind": outcomes(Scene(directory / family, kind, description, arguments))
            }
        except Exception as error:  # whatever it is: the other families are to be seen as well
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"}
        results.append({"family": family, **found})
    return results
