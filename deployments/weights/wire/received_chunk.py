"""A chunk as a worker has received it: what every transport hands to the staging."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from deployments.weights.wire.chunk_layout import Chunk, read_digests, view


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedChunk:
    """A chunk's tensors and the digests that were sent with them. Valid until the next one is requested.

    Attributes:
        memory_key: identifies the memory: with the same key, the same chunk has its tensors at the same
            addresses.
        sent: the digests from the sender (int64 [n], on the device of the tensors); None: it states none.
        read: returns the chunk's n tensors, in its order, without a copy.
    """

    chunk: Chunk
    memory_key: int
    sent: torch.Tensor | None
    read: Callable[[], list[torch.Tensor]]

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The chunk's tensors with their names."""
        return [(entry.name, tensor) for entry, tensor in zip(self.chunk.entries, self.read(), strict=True)]


def packed_chunk(chunk: Chunk, block: torch.Tensor) -> ReceivedChunk:
    """A chunk in one block (uint8 [chunk.size_bytes]): its tensors, then their digests."""
    return ReceivedChunk(
        chunk=chunk,
        memory_key=block.data_ptr(),
        sent=read_digests(chunk, block),
        read=partial(_views, chunk, block),
    )


def _views(chunk: Chunk, block: torch.Tensor) -> list[torch.Tensor]:
    return [view(entry, block) for entry in chunk.entries]
