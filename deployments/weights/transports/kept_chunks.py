"""Over a slow link, sends chunks as differences from the previous round.

Both halves keep their last round's chunks. A connection fails as a whole and is never reused, so all members
hold the same; a joining member makes a new connection, whose first round is whole. Digests are checked
afterwards, as for whole chunks.
"""

from collections.abc import Callable, Sequence

import torch

from deployments.protocol.errors import TransferFailed
from deployments.weights.wire.chunk_layout import Chunk
from deployments.weights.wire.delta import apply_delta, encode_delta
from deployments.weights.wire.digest import signed
from deployments.weights.wire.digest_definition import digest_bytes

Broadcast = Callable[[Sequence[torch.Tensor]], None]


class KeptChunks:
    """By place in a round: uint8 [chunk.size_bytes]."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}

    def send(self, index: int, chunk: Chunk, block: torch.Tensor, broadcast: Broadcast) -> None:
        """Send a chunk, whole if most of it has changed. The block may then be overwritten."""
        base, delta, identity = self._blocks.get(index), None, 0
        if base is None:
            base = self._blocks[index] = block.clone()
        else:
            identity = _identity(chunk, base)
            delta = encode_delta(block.numpy(), base.numpy())  # makes the base equal to the block
        sent = base if delta is None else torch.from_numpy(delta)
        broadcast([_header(sent.numel(), identity), sent])

    def receive(self, index: int, chunk: Chunk, broadcast: Broadcast) -> tuple[torch.Tensor, int]:
        """A chunk's block, and how many bytes arrived; `broadcast` returns when they have. The next round
        overwrites the block unless something still refers to it. Raises TransferFailed if the difference is
        from another chunk than the one kept here, or ValueError."""
        base = self._blocks.pop(index, None)
        header = _header(0, 0)
        broadcast([header])
        size_bytes, identity = header.view(torch.int64).tolist()
        if not 0 <= size_bytes <= chunk.size_bytes:
            raise ValueError(f"expected at most {chunk.size_bytes} bytes of chunk {index}, got {size_bytes}")
        if base is not None and _uses(base) == _ALONE:
            block = base
        else:
            block = torch.empty(chunk.size_bytes, dtype=torch.uint8)
        if size_bytes == chunk.size_bytes:
            broadcast([block])
        elif base is None or identity != _identity(chunk, base):
            raise TransferFailed(
                f"chunk {index} came as the difference from one that this worker does not have: connect again"
            )
        else:
            delta = torch.empty(size_bytes, dtype=torch.uint8)
            broadcast([delta])
            if block is not base:
                block.copy_(base)
            apply_delta(delta.numpy(), block.numpy())
        self._blocks[index] = block
        return block, size_bytes


def _uses(block: torch.Tensor) -> int:
    """The number of tensors and arrays that share its memory."""
    return int(torch._C._storage_Use_Count(block.untyped_storage()._cdata))


_ALONE = _uses(torch.empty(1))  # neither staging nor the store's writer has a tensor of it


def _header(size_bytes: int, identity: int) -> torch.Tensor:
    """The size of what follows, and the base's identity; uint8 [16]."""
    return torch.tensor([size_bytes, identity]).view(torch.uint8)


def _identity(chunk: Chunk, block: torch.Tensor) -> int:
    """The digest, as a signed number, of the digests of a chunk's tensors."""
    table = block[chunk.table_offset : chunk.size_bytes]
    return int(signed([digest_bytes(table.numpy())])[0])
