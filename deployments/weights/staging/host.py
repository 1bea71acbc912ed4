"""Staging in host memory: the tensors wait there and are loaded inside the pause."""

from typing import Any

import torch

from deployments.weights.staging.base import Tensors
from deployments.weights.staging.reports import LoadPlanSummary
from deployments.weights.wire.chunk_layout import Chunk
from deployments.weights.wire.digest_definition import Findings
from deployments.weights.wire.received_chunk import ReceivedChunk


class HostStaging:
    """The staged tensors by name, and the live model into which a swap loads them."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        self._tensors = {}

    def replay(self, received: ReceivedChunk) -> Findings | None:
        return None  # there is nothing to save: `add` only holds the tensors

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        self._tensors.update((name, tensor.cpu()) for name, tensor in tensors)

    def plans(self) -> LoadPlanSummary:
        return LoadPlanSummary()

    def finalize(self, *, complete: bool) -> list[str]:
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
