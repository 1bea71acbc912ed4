"""Staging on the device: a second instance of vLLM's model, filled while the engine decodes.

A swap copies tensor over tensor: addresses stay, and captured CUDA graphs stay valid. The instance is filled

    direct      by vLLM's loaders, and in later rounds by their recorded copies (`load_plan`)
    layerwise   by vLLM's layerwise reload, if the model processes weights after loading (fp8, MLA, some MoE)

What a layer derives from its weights is swapped too, or the engine refuses to start (`derived`).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from deployments.weights.staging.base import Staging, Tensors
from deployments.weights.staging.derived import Derived
from deployments.weights.staging.drafted_model import PolicyAndDrafter, checkpoint_tensors
from deployments.weights.staging.load_plan import LoadPlans
from deployments.weights.staging.nan_poison import NanPoison
from deployments.weights.staging.pairs import pair
from deployments.weights.staging.shadow_model import build_shadow, check_memory, check_support
from deployments.weights.wire.checkpoint_schema import join_reasons
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk
from deployments.weights.wire.digest import warm_up
from deployments.weights.wire.digest_definition import Findings


class DeviceStaging(Staging):
    """Build it after loading, before the KV cache is sized. Raises ValueError."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        check_support(vllm_config, device, model)
        check_memory(vllm_config, device, model)
        self._vllm_config = vllm_config
        self._live = model
        shadow = build_shadow(vllm_config, device, model)
        self._shadow, self._layerwise = shadow.model, shadow.layerwise
        self._pairs = pair(model, self._shadow)
        baked = not vllm_config.model_config.enforce_eager
        self._derived = Derived(model, self._shadow, shadow.moving, baked=baked)
        self._poison = NanPoison(self._shadow, model)
        warm_up(device)
        self._poison.warm_up()
        with torch.no_grad():
            self._pairs.copy_to_shadow()
        self.load_plans = LoadPlans()
        self._received: set[Chunk] = set()
        self._open = False
        self._holds_last = False  # the shadow, all of the last update
        self._live_written = torch.cuda.Event()
        torch.cuda.current_stream(device).synchronize()

    def begin(self) -> None:
        self._open = False
        self._received = set()

    def replay(self, received: ReceivedChunk) -> Findings | None:
        if not self._open:
            self._start()
        found = self.load_plans.replay(received)
        if found is not None:
            self._received.add(received.chunk)
        return found

    def holds(self, chunks: Sequence[Chunk]) -> bool:
        return self._holds_last and all(map(self.load_plans.can_restore, chunks))

    def reopen(self) -> None:
        """Without poison: what the last update filled this one does, by the same plans."""
        self._open, self._holds_last = True, False
        torch.cuda.current_stream().wait_event(self._live_written)

    def restore(self, chunk: Chunk, block: torch.Tensor) -> None:
        self.load_plans.restore(chunk, block)

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        if self._layerwise:
            # The reload keeps tensors until their layer is complete, longer than a transport does.
            self._load([(name, tensor.clone()) for name, tensor in tensors])
            return
        self._received.add(chunk)
        with self.load_plans.record(chunk, tensors):
            self._load(tensors)

    def finalize(
        self, *, complete: bool, check_open: Callable[[], None], keep_drafter: bool = False
    ) -> list[str]:
        if not self._open:
            return self._poison.names
        if keep_drafter and isinstance(self._shadow, PolicyAndDrafter):
            self._keep_drafter(self._shadow)
        unfilled = self._complete(complete)
        if unfilled:
            self.load_plans.refuse(self._received)
        else:
            self.load_plans.confirm(self._received)
        torch.cuda.current_stream().synchronize()
        return unfilled

    def swap(self) -> None:
        # Nothing waits for the copy: the next step is queued behind it.
        self._pairs.copy_to_live()
        self._derived.swap()
        self._live_written.record()

    def load(self, path: str) -> bool:
        # Not vLLM's reload of the live model: kernels that keep a parameter elsewhere (scales of fp8 experts)
        # would refer to a copy that no swap reaches.
        torch.cuda.synchronize()  # a dropped round may still be copying
        self.begin()
        with torch.no_grad():
            self._start()
            self._load(checkpoint_tensors(self._vllm_config, self._shadow, path))
            unfilled = self._complete(complete=True)
            self._holds_last = False
        if unfilled:
            self.drop()
            raise ValueError(f"{path} lacks weights of {join_reasons(unfilled)}")
        with torch.inference_mode():
            self.swap()
        return True

    def drop(self) -> None:
        self.load_plans.discard()
        if self._open and self._layerwise:
            self._abandon_layers(self._shadow.modules())
        self._open = False

    def release(self) -> None:
        self.load_plans.release()

    def _start(self) -> None:
        self._open, self._holds_last = True, False
        torch.cuda.current_stream().wait_event(self._live_written)  # the last swap reads the shadow
        if self._layerwise:
            with self._config():
                initialize_layerwise_reload(self._shadow)
            return
        # Else a layer that receives nothing would silently keep its old weights.
        self._poison.apply()

    def _complete(self, complete: bool) -> list[str]:
        layerwise = self._layerwise
        unfilled = self._finalize_layers(complete) if layerwise else self._unwritten(complete)
        if not unfilled:
            self._pairs.check_tied()
            self._derived.collect()
            self._open, self._holds_last = False, True
        return unfilled

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with self._config(), disable_mtp_completeness_check():
            self._shadow.load_weights(tensors)

    def _unwritten(self, complete: bool) -> list[str]:
        unfilled = self._poison.remaining()
        if not complete:
            return unfilled
        self._poison.restore_live(unfilled)
        return []

    def _finalize_layers(self, complete: bool) -> list[str]:
        unfilled = []
        for name, layer in self._shadow.named_modules():
            info = get_layerwise_info(layer)
            wanted = info.load_numel_total
            filled = complete and info.load_numel > 0  # else the layer keeps its own tensors
            if wanted and info.restore_metadata[0] and not filled:
                unfilled += [f"{name}.{parameter}" for parameter in info.restore_metadata[0]]
        unfilled = [name for name in unfilled if not _is_optional(name)]
        if unfilled:
            self._abandon_layers(self._shadow.modules())
        else:
            with self._config():
                finalize_layerwise_reload(self._shadow, self._vllm_config.model_config)
        return unfilled

    def _keep_drafter(self, shadow: PolicyAndDrafter) -> None:
        layers = set(shadow.drafter.modules()) - set(shadow.policy.modules())
        if self._layerwise:
            self._abandon_layers(layers)
        shadow.copy_drafter(self._live)
        if self._layerwise:
            with self._config():
                for layer in filter(is_deferred_attention_layer, layers):
                    layer.process_weights_after_loading(self._vllm_config.model_config.dtype)

    def _abandon_layers(self, layers: Iterable[torch.nn.Module]) -> None:
        for layer in layers:
            info = get_layerwise_info(layer)
            if info.can_load():
                _place_kernel_tensors(layer, info)
            info.reset()

    def _config(self) -> AbstractContextManager[Any]:
        # Process-wide: set only where processing reads it.
        return set_current_vllm_config(self._vllm_config) if self._layerwise else nullcontext()


def _is_optional(name: str) -> bool:
    """Scales of attention: most checkpoints lack them; vLLM fills them after loading."""
    return name.endswith(("k_scale", "v_scale", "q_scale", "prob_scale"))
