"""What a publisher sends, chunk by chunk, from a source of tensors.

Tensors that a source makes in each pass (gathered, cast) are taken as they come. Those that are the
model's own memory stay where they are: the work of a chunk is then prepared once, and a round is a few
launches without a line of Python for each tensor.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from vllm.distributed.weight_transfer.base import WeightSource

from deployments.weights.digest import Copy, Findings, survey
from deployments.weights.packing import pack, plan_chunks, put_digests, view


@runtime_checkable
class ResidentSource(Protocol):
    """A source that may say where its tensors lie for good; see `ParameterSource.resident`."""

    def resident(self) -> list[torch.Tensor] | None: ...


class Packer:
    """Attributes:
    metadata: (name, dtype, shape) of what is sent, in its order.
    resident: the tensors themselves, if they are the model's own memory.
    """

    def __init__(self, source: WeightSource, chunk_bytes: int) -> None:
        self._source = source
        self.metadata = [(meta.name, meta.dtype, tuple(meta.shape)) for meta in source.metadata()]
        self.chunks = plan_chunks(self.metadata, chunk_bytes)
        self.resident: list[torch.Tensor] | None = None
        self._firsts = list(accumulate((len(chunk.entries) for chunk in self.chunks), initial=0))
        self._passing: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._ready: dict[tuple[int, int], Callable[[], Findings]] = {}  # by chunk and address of the block
        self.look()

    def look(self) -> bool:
        """Find out where the source's tensors are; whether they are where they were.

        Raises:
            ValueError: they are not what the source declares.
        """
        found = self._source.resident() if isinstance(self._source, ResidentSource) else None
        if found is self.resident:
            return True
        if found is not None:
            _check(self.metadata, found)
        self.resident, self._ready = found, {}
        return False

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
            copies = [
                Copy(place=place, source=source, target=view(entry, block))
                for place, (source, entry) in enumerate(zip(sources, chunk.entries, strict=True))
            ]
            find = survey(sources, copies)
            if block.is_cuda:  # a block in host memory is another one in every round
                self._ready[index, block.data_ptr()] = find
        put_digests(chunk, find().digests, block)

    def skip(self) -> None:
        """Run the pass of a rank that sends nothing: materializing is a collective, so it takes part."""
        for _ in self._passing:
            pass


def _check(metadata: list[tuple[str, torch.dtype, tuple[int, ...]]], resident: list[torch.Tensor]) -> None:
    declared = [(dtype, shape) for _, dtype, shape in metadata]
    found = [(tensor.dtype, tuple(tensor.shape)) for tensor in resident]
    if found == declared:
        return
    wrong = next((i for i, pair in enumerate(zip(declared, found, strict=False)) if pair[0] != pair[1]), None)
    if wrong is None:
        raise ValueError(f"the source declared {len(declared)} tensors and holds {len(found)}")
    raise ValueError(f"the source declared {metadata[wrong]} and holds {found[wrong]}")
