"""vLLM's own CPU worker with our extension and a transport that reads from the test's memory.

The worker's rules for an update (what is active, in which order calls are allowed) are vLLM's, not a fake's.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.v1.worker.cpu_worker import CPUWorker

from deployments.replica.worker_extension import WorkerExtension
from deployments.weights.staging.cpu_shadow import CpuShadowStaging
from deployments.weights.staging.staged_update import StagingState, from_wire
from deployments.weights.staging.transfer_engine import StagedWeightTransferEngine
from deployments.weights.wire.chunk_layout import ReceivedChunk, pack, packed_chunk, plan_chunks

Tensors = list[tuple[str, torch.Tensor]]


class Model(torch.nn.Module):
    """Two parameters, loaded as vLLM's models load theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.b = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}


def weights(value: float) -> Tensors:
    return [("w", torch.full((2, 3), value)), ("b", torch.full((3,), value, dtype=torch.bfloat16))]


def chunks_of(tensors: Tensors, chunk_bytes: int = 1 << 20) -> Iterator[ReceivedChunk]:
    """What a transport yields when these tensors arrive intact."""
    for chunk in plan_chunks([(name, tensor.dtype, tensor.shape) for name, tensor in tensors], chunk_bytes):
        block = torch.zeros(chunk.size_bytes, dtype=torch.uint8)
        taken = {entry.name for entry in chunk.entries}
        pack(chunk, iter([pair for pair in tensors if pair[0] in taken]), block)
        yield packed_chunk(chunk, block)


@dataclass
class MemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class MemoryUpdateInfo(WeightTransferUpdateInfo):
    """Names one of the engine's `payloads`."""

    payload: str


class MemoryTransferEngine(StagedWeightTransferEngine[MemoryInitInfo, MemoryUpdateInfo]):
    """Receives what the test has put into `payloads`."""

    init_info_cls = MemoryInitInfo
    update_info_cls = MemoryUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.payloads: dict[str, Callable[[], Iterator[ReceivedChunk]]] = {}
        self.on_connect: Callable[[], None] = lambda: None

    def connect(self, init_info: MemoryInitInfo) -> None:
        self.on_connect()

    def receive(self, update_info: MemoryUpdateInfo) -> Iterator[ReceivedChunk]:
        yield from self.payloads[update_info.payload]()


class ModelRunner:
    """The part of vLLM's model runner that the worker calls."""

    def __init__(self, model: Model, vllm_config: VllmConfig) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self.loaded_from: str | None = None

    def get_model(self) -> Model:
        return self._model

    def get_draft_model(self) -> None:
        return None

    def reload_weights(self, weights_path: str) -> None:
        self.loaded_from = self._vllm_config.model_config.model = weights_path  # as vLLM does

    def reset_lora_state(self) -> None:
        pass


class MemoryWorker(CPUWorker, WorkerExtension):  # in the order in which vLLM mixes it in
    """A worker that was never started: no device, no distributed environment."""

    def __init__(
        self, checkpoint: Path | str, *, index: int = 0, loaded: Path | None = None, shadow: bool = False
    ) -> None:
        """One that was loaded from the checkpoint of the fleet, or from a version in the store.

        Args:
            checkpoint: a directory, or a hub id.
            shadow: the next version is prepared beside the one that serves.
        """
        self.model = Model()
        record_metadata_for_reloading(self.model)  # as vLLM's loader does it
        self.rank = index
        self.vllm_config = VllmConfig()
        self.vllm_config.model_config = SimpleNamespace(
            model=str(loaded or checkpoint),
            revision=None,
            dtype=torch.float32,
            get_total_num_hidden_layers=lambda: 1,
        )
        self.vllm_config.additional_config = {"checkpoint": str(checkpoint)}
        self.vllm_config.parallel_config.rank = index
        self.vllm_config.parallel_config.world_size = 2
        self.model_runner = ModelRunner(self.model, self.vllm_config)
        self.engine = MemoryTransferEngine(
            SimpleNamespace(), self.vllm_config, torch.device("cpu"), self.model
        )
        if shadow:
            self.engine.staging = CpuShadowStaging(self.vllm_config, self.model, Model())
        self.weight_transfer_engine = self.engine
        self._weight_update_active = False
        self._weight_update_is_draft = False

    def offer(self, name: str, tensors: Tensors) -> dict[str, str]:
        """Put a payload where the engine will receive it; what names it."""
        self.engine.payloads[name] = lambda: chunks_of(tensors)
        return {"payload": name}


def write_checkpoint(directory: Path) -> Path:
    """A checkpoint of `Model`, whose schema the engine reads."""
    directory.mkdir()
    save_file(dict(weights(0.0)), directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


TIMEOUT_S = 20.0


def receive(worker: MemoryWorker, tensors: Tensors, name: str = "p", **options: Any) -> StagingState:
    """One payload from the call to its end."""
    arguments = {"share": 1.0, "begins": True, "retain_version": None} | options
    worker.staging_receive(worker.offer(name, tensors), **arguments)
    return progress_of(worker)


def progress_of(worker: MemoryWorker) -> StagingState:
    return _decoded(worker.staging_progress(TIMEOUT_S))


def verify(worker: MemoryWorker) -> StagingState:
    return _decoded(worker.staging_verify())


def _decoded(answer: Any) -> StagingState:
    assert json.loads(json.dumps(answer)) == answer, "vLLM carries JSON types"
    return from_wire(StagingState, answer)
