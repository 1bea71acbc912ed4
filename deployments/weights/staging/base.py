"""What the transfer engine requires of a staging, where a version waits until the fleet has decided, and of
the engine whatever its staging."""

from collections.abc import Callable, Iterable
from typing import Protocol, cast

import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model_loader

from deployments.weights.staging.worker_reports import LoadPlanSummary
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk
from deployments.weights.wire.digest_definition import Findings

Tensors = list[tuple[str, torch.Tensor]]  # by Hugging Face name

# Methods of speculative decoding.
_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")


class Staging(Protocol):
    """A version that waits beside the live one, on the device or in host memory."""

    def begin(self) -> None:
        """Start an update."""

    def replay(self, received: ReceivedChunk) -> Findings | None:
        """Stage a chunk that is known from an earlier round, and inspect its tensors on the way.

        Called on the staging thread, while the engine decodes. On a GPU the copies are only queued, on the
        current stream; the chunk's memory is reused in the order of that stream.

        Returns:
            None if the chunk is not known, and nothing was done.
        """

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        """Stage a chunk that is not known, from its tensors. Called like `replay`."""

    def plans(self) -> LoadPlanSummary:
        """How many chunks `replay` stages, and why it does not stage others."""

    def finalize(self, *, complete: bool, rest: Callable[[], None]) -> list[str]:
        """Finish what loading left open: nothing more arrives. Called on the staging thread.

        Args:
            complete: every tensor of the model's checkpoint arrived, so that what was never written is
                padding and not a missing tensor.
            rest: to be called between two units of work on the host, which the engine decodes beside.

        Returns:
            The names of the model's parameters that were not filled.
        """

    def swap(self) -> None:
        """Make the staged version the live one.

        Called with the scheduler paused, on the thread and the stream of the model; on a GPU the copy is only
        queued.
        """

    def load(self, path: str) -> bool:
        """Make a checkpoint directory the live model. Called as `swap`, while no version is staged.

        Returns:
            False if this staging does not load, and nothing was done: vLLM's reload does.

        Raises:
            ValueError: the checkpoint is not complete.
        """

    def retire(self) -> None:
        """Free what the swap has replaced. Called on the staging thread, after the swap."""

    def drop(self) -> None:
        """Discard the staged version."""

    def release(self) -> None:
        """Hold no memory in which chunks arrive: its connection ends."""


def check_draft(vllm_config: VllmConfig) -> None:
    """Check that no draft model was loaded from the checkpoint whose later versions arrive here.

    A draft with a checkpoint of its own is no part of a version, and the served model checks what it
    proposes. Layers that the two share follow the update.

    Raises:
        ValueError: one was: an update would leave it at the first version.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_WEIGHTS:
        return
    draft = speculative.draft_model_config
    if draft is not None and draft.model == vllm_config.model_config.model:
        raise ValueError(
            f"speculative decoding with method {speculative.method!r} loads a draft model from the served "
            f"model's own checkpoint, {draft.model!r}, and updates would not reach it; use a draft model "
            "with a checkpoint of its own, or no speculative decoding"
        )


def checkpoint_tensors(
    vllm_config: VllmConfig, model: torch.nn.Module, path: str
) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of a directory by checkpoint name, one after the other. As in vLLM's own reload, the
    model's configuration names this directory from then on.

    Raises:
        ValueError: the engine's load format has no files.
    """
    loader = get_model_loader(vllm_config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise ValueError(
            f"a checkpoint cannot be loaded with load_format {vllm_config.load_config.load_format!r}"
        )
    model_config = vllm_config.model_config
    # The other two belong to what the engine was loaded from.
    model_config.model, model_config.model_weights, model_config.revision = path, "", None
    return cast("Iterable[tuple[str, torch.Tensor]]", loader.get_all_weights(model_config, model))
