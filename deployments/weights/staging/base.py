"""Where a version waits at a worker until the fleet has decided."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from vllm.config import VllmConfig

from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk
from deployments.weights.wire.digest_definition import Findings

Tensors = list[tuple[str, torch.Tensor]]  # Hugging Face names
GIB = 1 << 30


class Staging(ABC):
    """`begin`, `swap` and `load` run on the engine's thread, the others on the staging thread while it
    decodes."""

    @abstractmethod
    def begin(self) -> None: ...

    def replay(self, received: ReceivedChunk) -> Findings | None:
        """False: the chunk is not known from an earlier round."""
        return None

    def holds(self, chunks: Sequence[Chunk]) -> bool:
        """Whether all of them can be restored from what the last update left here."""
        return False

    def reopen(self) -> None:
        """The update that began consists of differences from the last one."""
        raise AssertionError("holds nothing")

    def restore(self, chunk: Chunk, block: torch.Tensor) -> None:
        """Write the tensors of the last update into a block (uint8 [chunk.size_bytes])."""
        raise AssertionError("holds nothing")

    @abstractmethod
    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        pass

    @abstractmethod
    def finalize(
        self, *, complete: bool, check_open: Callable[[], None], keep_drafter: bool = False
    ) -> list[str]:
        """Nothing more arrives. Returns the names of parameters that were not filled. `complete`: all tensors
        of the checkpoint arrived, so the rest is padding. `check_open` raises once the update is dropped.
        `keep_drafter`: its tensors did not come."""

    @abstractmethod
    def swap(self) -> None:
        """Make the version live, inside a pause of the scheduler."""

    def load(self, path: str) -> bool:
        """Make a checkpoint directory the live model; False leaves that to vLLM's reload."""
        return False

    def retire(self) -> None:  # noqa: B027
        ...

    @abstractmethod
    def drop(self) -> None: ...

    def release(self) -> None:  # noqa: B027
        ...


def second_instance_config(vllm_config: VllmConfig) -> VllmConfig:
    """Layers register by name in the compilation config, where the runner looks up the live ones."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    return config


def outer_columns(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() > 1 and tensor.shape[-1] > 1:
        return tensor[..., :: tensor.shape[-1] - 1]
    return tensor


def tied_refusal(first: str, second: str) -> str:
    return (
        f"{first!r} and {second!r} were equal in the checkpoint that this engine started from, so it has one "
        "tensor for both, and now they differ; start the engine from a checkpoint in which they do"
    )
