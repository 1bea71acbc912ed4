"""Staging in host memory: the tensors wait there and are loaded inside the pause."""

from typing import Any

import torch

from deployments.weights.wire.chunk_layout import Chunk
from deployments.weights.wire.digest_definition import Findings
from deployments.weights.wire.received_chunk import ReceivedChunk


class HostStaging:
    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        self._tensors = {}

    def replay(self, arrival: ReceivedChunk) -> Findings | None:
        return None  # keeping the tensors is all that there is to do

    def add(self, chunk: Chunk, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._tensors.update((name, tensor.cpu()) for name, tensor in tensors)

    def plans(self) -> dict[str, Any]:
        return {"chunks": 0, "refused": []}

    def seal(self, *, complete: bool) -> list[str]:
        return []

    def swap(self) -> None:
        # On a CPU, linear weights are repacked after loading: only the layerwise reload, which runs
        # that step again, changes what the model computes.
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self._model)
        self._model.load_weights(self._tensors.items())
        finalize_layerwise_reload(self._model, self._model_config)
        self.drop()

    def drop(self) -> None:
        self._tensors = {}

    def release(self) -> None:
        pass
