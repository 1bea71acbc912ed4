"""What the transfer engine requires of a staging: where a version waits until the fleet has decided."""

from typing import Protocol

import torch

from deployments.weights.staging.reports import LoadPlanSummary
from deployments.weights.wire.chunk_layout import Chunk
from deployments.weights.wire.digest_definition import Findings
from deployments.weights.wire.received_chunk import ReceivedChunk

Tensors = list[tuple[str, torch.Tensor]]  # by Hugging Face name


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

    def finalize(self, *, complete: bool) -> list[str]:
        """Finish what loading left open: nothing more arrives. Called on the staging thread.

        Args:
            complete: every tensor of the model's checkpoint arrived, so that what was never written is
                padding and not a missing tensor.

        Returns:
            The names of the model's parameters that were not filled.
        """

    def swap(self) -> None:
        """Make the staged version the live one.

        Called with the scheduler paused, on the thread and the stream of the model; on a GPU the copy is only
        queued.
        """

    def drop(self) -> None:
        """Discard the staged version."""

    def release(self) -> None:
        """Hold no memory in which chunks arrive: its connection ends."""
