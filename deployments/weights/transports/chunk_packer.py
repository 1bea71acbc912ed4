"""What a publisher sends, chunk by chunk, from a source of tensors.

Tensors that a source makes in each pass (gathered, converted) are taken as they come. Those that are the
model's own memory stay where they are: the work of a chunk, the cast to what is declared included, is then
prepared once, and a round is a few launches without a line of Python for each tensor.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from vllm.distributed.weight_transfer.base import WeightSource

from deployments.weights.wire.chunk_layout import pack, plan_chunks, write_digests, view
from deployments.weights.wire.digest import prepare_inspection
from deployments.weights.wire.digest_definition import Copy, Findings

Metadata = list[tuple[str, torch.dtype, tuple[int, ...]]]


@runtime_checkable
class ResidentSource(Protocol):
    """A source that may say where its tensors lie for good; see `ParameterSource.resident`."""

    def resident(self) -> list[torch.Tensor] | None: ...


class Packer:
    """Attributes:
    metadata: (name, dtype, shape) of what is sent, in its order.
    resident: the tensors themselves, if they are the model's own memory; before the cast.
    in_place: the same, if there is no cast.
    """

    def __init__(self, source: WeightSource, chunk_bytes: int) -> None:
        self._source = source
        self.metadata = [(meta.name, meta.dtype, tuple(meta.shape)) for meta in source.metadata()]
        self.chunks = plan_chunks(self.metadata, chunk_bytes)
        self.resident: list[torch.Tensor] | None = None
        self.in_place: list[torch.Tensor] | None = None
        self._firsts = list(accumulate((len(chunk.entries) for chunk in self.chunks), initial=0))
        self._passing: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._ready: dict[tuple[int, int], Callable[[], Findings]] = {}  # by chunk and address of the block
        self.look()

    def look(self) -> None:
        """Find out where the source's tensors are.

        Raises:
            ValueError: they are not what the source declares.
        """
        found = self._source.resident() if isinstance(self._source, ResidentSource) else None
        if found is self.resident:
            return
        if found is not None:
            _check(self.metadata, found)
        self.resident, self._ready = found, {}
        self.in_place = found if found is not None and not _is_cast(self.metadata, found) else None

    def begin(self) -> None:
        """Before each round."""
        self.look()
        self._passing = iter(self._source) if self.resident is None else iter(())

    def pack(self, index: int, block: torch.Tensor) -> None:
        """Write chunk `index` (they come in order) and its digests into `block`; on a GPU it is queued.

        Raises:
            ValueError: the source yields another tensor than it declared.
        """
        chunk = self.chunks[index]
        if self.resident is None:
            pack(chunk, self._passing, block)
            return
        find = self._ready.get((index, block.data_ptr()))
        if find is None:
            sources = self.resident[self._firsts[index] : self._firsts[index + 1]]
            targets = [view(entry, block) for entry in chunk.entries]
            pairs = list(zip(sources, targets, strict=True))
            copies = [Copy(index=place, source=s, target=t) for place, (s, t) in enumerate(pairs)]
            # The digest is that of what goes out: of a cast tensor, of its copy.
            find = prepare_inspection([s if s.dtype == t.dtype else t for s, t in pairs], copies)
            if block.is_cuda:  # a block in host memory is another one in every round
                self._ready[index, block.data_ptr()] = find
        write_digests(chunk, find().digests, block)

    def skip(self) -> None:
        """Run the pass of a rank that sends nothing: materializing is a collective, so it takes part."""
        for _ in self._passing:
            pass


def _is_cast(metadata: Metadata, resident: list[torch.Tensor]) -> bool:
    return any(tensor.dtype != dtype for tensor, (_, dtype, _) in zip(resident, metadata, strict=True))


def _check(metadata: Metadata, resident: list[torch.Tensor]) -> None:
    if len(metadata) != len(resident):
        raise ValueError(f"the source declared {len(metadata)} tensors and holds {len(resident)}")
    for (name, dtype, shape), tensor in zip(metadata, resident, strict=True):
        castable = dtype.is_floating_point and tensor.is_floating_point()
        if tuple(tensor.shape) != shape or not (tensor.dtype == dtype or castable):
            found = (tensor.dtype, tuple(tensor.shape))
            raise ValueError(f"the source declared {(name, dtype, shape)} and holds {found}")
