"""Over a slow link, sends chunks as differences from the previous round.

Both halves keep their last round's chunks; over `nccl` the publisher does, and workers have them in their
shadows. A connection fails as a whole and is never reused, so all members hold the same; a joining member
makes a new connection, whose first round is whole. Digests are checked afterwards, as for whole chunks.
"""

from collections.abc import Callable, Sequence

import torch

from deployments.protocol.errors import TransferFailed
from deployments.weights.wire import delta, delta_cuda
from deployments.weights.wire.chunk_layout import Chunk
from deployments.weights.wire.digest import signed
from deployments.weights.wire.digest_definition import digest_bytes

Broadcast = Callable[[Sequence[torch.Tensor]], None]


class KeptChunks:
    """By place in a round: uint8 [chunk.size_bytes]. `in_host_memory`: also those of a GPU."""

    def __init__(self, *, in_host_memory: bool = False) -> None:
        self._blocks: dict[int, torch.Tensor] = {}
        self._in_host_memory = in_host_memory

    def __len__(self) -> int:
        return len(self._blocks)

    def send(
        self, index: int, chunk: Chunk, block: torch.Tensor, broadcast: Broadcast, *, whole: bool = False
    ) -> None:
        """Send a chunk, also whole if most of it has changed. A block in host memory may then be overwritten,
        one of a GPU in the order of its stream."""
        kept, difference, identity = self._blocks.get(index), None, 0
        if kept is None:
            pinned = block.is_cuda and self._in_host_memory
            kept = torch.empty_like(block, device="cpu" if pinned else None, pin_memory=pinned)
            self._blocks[index], whole = kept, True
        if whole:
            kept.copy_(block, non_blocking=True)
        else:
            identity = _identity(chunk, kept)
            base = kept.to(block.device, non_blocking=True)
            difference = encode(block, base)
            if base is not kept:
                kept.copy_(base, non_blocking=True)
        sent = difference
        if sent is None:
            sent = kept if kept.device == block.device else block
        broadcast([header(sent.numel(), identity), sent])

    def receive(self, index: int, chunk: Chunk, broadcast: Broadcast) -> tuple[torch.Tensor, int]:
        """A chunk's block, and how many bytes arrived; `broadcast` returns when they have. The next round
        overwrites the block unless something still refers to it. Raises TransferFailed if the difference is
        from another chunk than the one kept here, or ValueError."""
        base = self._blocks.pop(index, None)
        told = header(0, 0)
        broadcast([told])
        size_bytes, identity = read_header(told, index, chunk)
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
            difference = torch.empty(size_bytes, dtype=torch.uint8)
            broadcast([difference])
            if block is not base:
                block.copy_(base)
            apply(difference, block)
        self._blocks[index] = block
        return block, size_bytes


def _uses(block: torch.Tensor) -> int:
    """The number of tensors and arrays that share its memory."""
    return int(torch._C._storage_Use_Count(block.untyped_storage()._cdata))


_ALONE = _uses(torch.empty(1))  # neither staging nor the store's writer has a tensor of it


def header(size_bytes: int, identity: int) -> torch.Tensor:
    """The size of what follows, and the base's identity; uint8 [16]."""
    return torch.tensor([size_bytes, identity], device="cpu").view(torch.uint8)


def read_header(told: torch.Tensor, index: int, chunk: Chunk) -> tuple[int, int]:
    """Raises ValueError."""
    size_bytes, identity = told.view(torch.int64).tolist()
    if not 0 <= size_bytes <= chunk.size_bytes:
        raise ValueError(f"expected at most {chunk.size_bytes} bytes of chunk {index}, got {size_bytes}")
    return size_bytes, identity


def encode(block: torch.Tensor, base: torch.Tensor) -> torch.Tensor | None:
    """What turns `base` into `block`, which it becomes. None: it is more than half of the block."""
    if block.is_cuda:
        return delta_cuda.encode_delta(block, base)
    encoded = delta.encode_delta(block.numpy(), base.numpy())
    return None if encoded is None else torch.from_numpy(encoded)


def apply(difference: torch.Tensor, block: torch.Tensor) -> None:
    """Raises ValueError if it is the difference of another block."""
    if block.is_cuda:
        delta_cuda.apply_delta(difference, block)
    else:
        delta.apply_delta(difference.numpy(), block.numpy())


def _identity(chunk: Chunk, block: torch.Tensor) -> int:
    """The digest, as a signed number, of the digests of a chunk's tensors. 0 on a GPU, for which the host
    would have to wait: there the workers compare what they have, before a round."""
    if block.is_cuda:
        return 0
    table = block[chunk.table_offset : chunk.size_bytes]
    return int(signed([digest_bytes(table.numpy())])[0])
