"""A chunk as it has come to a worker: what every transport hands to the staging, or why nothing comes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from deployments.weights.wire.chunk_layout import Chunk, sent_digests, view


class BrokenGroup(ValueError):
    """A peer of the transfer is gone. The replica is sound: the round must be sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Valid until the next one is asked for.

    Attributes:
        place: names its memory: in the same place, the same chunk has its tensors at the same addresses.
        sent: the digests that came along (int64 [n], where the tensors are).
        read: the chunk's tensors, in its order, without a copy.
    """

    chunk: Chunk
    place: int
    sent: torch.Tensor
    read: Callable[[], list[torch.Tensor]]

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [(entry.name, tensor) for entry, tensor in zip(self.chunk.entries, self.read(), strict=True)]


def packed(chunk: Chunk, block: torch.Tensor) -> Arrival:
    """A chunk in one block (uint8 [chunk.size_bytes]) with its digests behind it."""
    return Arrival(
        chunk=chunk,
        place=block.data_ptr(),
        sent=sent_digests(chunk, block),
        read=partial(_views, chunk, block),
    )


def _views(chunk: Chunk, block: torch.Tensor) -> list[torch.Tensor]:
    return [view(entry, block) for entry in chunk.entries]
