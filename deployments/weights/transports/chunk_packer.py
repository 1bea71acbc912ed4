"""Packs a source's tensors into chunks.

There are two kinds of sources. Tensors that a source makes in each pass (gathered, converted) are packed in
the order in which it yields them. Tensors that are the model's own memory are resident: the work of a chunk,
including a cast, is prepared once, and a round is a few launches without Python code for each tensor.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from vllm.distributed.weight_transfer.base import WeightSource

from deployments.weights.wire.chunk_layout import pack, plan_chunks, view, write_digests
from deployments.weights.wire.digest import prepare_digests
from deployments.weights.wire.digest_definition import Copy

Metadata = list[tuple[str, torch.dtype, tuple[int, ...]]]


@runtime_checkable
class ResidentSource(Protocol):
    """A source whose tensors may stay at the same addresses; see `ParameterSource.resident`."""

    def resident(self) -> list[torch.Tensor] | None: ...


class ChunkPacker:
    """The chunks of a source, and their content in each round.

    Attributes:
        metadata: (name, dtype, shape) of what is sent, in its order.
        resident: the tensors themselves if they are the model's own memory, before the cast; else None.
        in_place: the same if no tensor is cast; else None.

    Raises:
        ValueError: the source's resident tensors are not those that it declares.
    """

    def __init__(self, source: WeightSource, chunk_bytes: int) -> None:
        self._source = source
        self.metadata = [(meta.name, meta.dtype, tuple(meta.shape)) for meta in source.metadata()]
        self.chunks = plan_chunks(self.metadata, chunk_bytes)
        self.resident: list[torch.Tensor] | None = None
        self.in_place: list[torch.Tensor] | None = None
        self._firsts = list(accumulate((len(chunk.entries) for chunk in self.chunks), initial=0))
        self._pass: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._digests: dict[tuple[int, int], Callable[[], torch.Tensor]] = {}  # by chunk and address of block
        self.refresh_resident()

    def refresh_resident(self) -> None:
        """Ask the source again where its tensors are.

        Raises:
            ValueError: they are not those that it declares.
        """
        resident = self._source.resident() if isinstance(self._source, ResidentSource) else None
        if resident is self.resident:
            return
        if resident is not None:
            _check(self.metadata, resident)
        self.resident, self._digests = resident, {}
        self.in_place = None if resident is None or _is_cast(self.metadata, resident) else resident

    def begin(self) -> None:
        """Call before each round.

        Raises:
            ValueError: as `refresh_resident`.
        """
        self.refresh_resident()
        self._pass = iter(self._source) if self.resident is None else iter(())

    def pack(self, index: int, block: torch.Tensor) -> None:
        """Write chunk `index` and its digests into a block; chunks must be packed in their order.

        Args:
            block: uint8 [chunk.size_bytes] on the sending device; on a GPU the work is only queued.

        Raises:
            ValueError: the source yields a tensor that it did not declare.
        """
        chunk = self.chunks[index]
        if self.resident is None:
            pack(chunk, self._pass, block)
            return
        digests = self._digests.get((index, block.data_ptr()))
        if digests is None:
            sources = self.resident[self._firsts[index] : self._firsts[index + 1]]
            targets = [view(entry, block) for entry in chunk.entries]
            pairs = list(zip(sources, targets, strict=True))
            copies = [Copy(index=i, source=source, target=target) for i, (source, target) in enumerate(pairs)]
            # The digest is that of what is sent: of the copy, if the tensor is cast (on a GPU in one pass).
            inspected = [source if source.dtype == target.dtype else target for source, target in pairs]
            digests = prepare_digests(inspected, copies)
            if block.is_cuda:  # blocks in host memory are new in every round
                self._digests[index, block.data_ptr()] = digests
        write_digests(chunk, digests(), block)

    def drain(self) -> None:
        """Run the source's pass without packing: its gathers are collectives of all ranks."""
        for _ in self._pass:
            pass


def _is_cast(metadata: Metadata, resident: list[torch.Tensor]) -> bool:
    return any(tensor.dtype != dtype for tensor, (_, dtype, _) in zip(resident, metadata, strict=True))


def _check(metadata: Metadata, resident: list[torch.Tensor]) -> None:
    if len(metadata) != len(resident):
        raise ValueError(f"the source declared {len(metadata)} tensors and has {len(resident)}")
    for (name, dtype, shape), tensor in zip(metadata, resident, strict=True):
        castable = dtype.is_floating_point and tensor.is_floating_point()
        if tuple(tensor.shape) != shape or not (tensor.dtype == dtype or castable):
            actual = (tensor.dtype, tuple(tensor.shape))
            raise ValueError(f"the source declared {(name, dtype, shape)} and has {actual}")
