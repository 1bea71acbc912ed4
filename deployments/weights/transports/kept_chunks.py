"""Sends the chunks of a round as differences from those of the round before, over a slow link.

Both halves of a connection keep the chunks of its last round. A connection fails as a whole and is not used
again, so all its members have the same; a member that joins makes a new connection, whose first round is
whole. The digests of a chunk's tensors are checked after this, as those of a chunk that was sent whole.
"""

from collections.abc import Callable, Sequence

import torch

from deployments.protocol.errors import TransferFailed
from deployments.weights.wire.chunk_layout import Chunk
from deployments.weights.wire.delta import apply_delta, encode_delta
from deployments.weights.wire.digest import signed
from deployments.weights.wire.digest_definition import digest_bytes

Broadcast = Callable[[Sequence[torch.Tensor]], None]  # returns when the bytes have passed


class KeptChunks:
    """One member's, by their places in a round. Staging may hold the same memory: blocks (uint8
    [chunk.size_bytes]) are not changed once they are here."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}

    def send(self, index: int, chunk: Chunk, block: torch.Tensor, broadcast: Broadcast) -> int:
        """Send a chunk, whole if most of it has changed. Returns how many bytes that took."""
        base = self._blocks.get(index)
        delta = None if base is None else encode_delta(block.numpy(), base.numpy())
        if base is None or delta is None:
            sent, header = block, _header(block.numel(), 0)
        else:
            sent = torch.from_numpy(delta)
            header = _header(sent.numel(), _identity(chunk, base))
        broadcast([header, sent])
        self._blocks[index] = block
        return sent.numel()

    def receive(self, index: int, chunk: Chunk, block: torch.Tensor, broadcast: Broadcast) -> int:
        """Fill the block. Returns how many bytes arrived. Raises TransferFailed if it is the difference from
        another chunk than the one kept here, or ValueError."""
        base = self._blocks.pop(index, None)
        header = _header(0, 0)
        broadcast([header])
        size_bytes, identity = header.view(torch.int64).tolist()
        if not 0 <= size_bytes <= block.numel():
            raise ValueError(f"expected at most {block.numel()} bytes of chunk {index}, got {size_bytes}")
        if size_bytes == block.numel():
            broadcast([block])
        elif base is None or identity != _identity(chunk, base):
            raise TransferFailed(
                f"chunk {index} came as the difference from one that this worker does not have: connect again"
            )
        else:
            delta = torch.empty(size_bytes, dtype=torch.uint8)
            broadcast([delta])
            apply_delta(delta.numpy(), block.copy_(base).numpy())
        self._blocks[index] = block
        return size_bytes


def _header(size_bytes: int, identity: int) -> torch.Tensor:
    """The size of what follows, and the base's identity; uint8 [16]."""
    return torch.tensor([size_bytes, identity]).view(torch.uint8)


def _identity(chunk: Chunk, block: torch.Tensor) -> int:
    """The digest, as a signed number, of the digests of a chunk's tensors."""
    table = block[chunk.table_offset : chunk.size_bytes]
    return int(signed([digest_bytes(table.numpy())])[0])
