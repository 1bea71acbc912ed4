"""The copies that vLLM's loaders make for a chunk: recorded once, then repeated without the loaders, whose
Python slows the decoding thread.

A chunk has a plan if its first load only copied views of received tensors to views of parameters, and each
target held its source's bytes at the end of the round.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deployments.weights.staging.base import Tensors
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk, view
from deployments.weights.wire.digest import digest_tensor, prepare_copies, prepare_inspection
from deployments.weights.wire.digest_definition import Copy, Findings

_COPY = torch.ops.aten.copy_.default
_CONSTANTS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)  # they pad a vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCopy:
    index: int  # position of the tensor in the chunk
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    target: torch.Tensor

    def source(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.of(tensors[self.index])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(slots=True)
class _Plan:
    copies: list[PlannedCopy]
    digests: list[torch.Tensor]  # the sources' in the first round
    is_whole: bool  # the targets have all of each tensor, in its dtype
    prepared: dict[int, Callable[[], Findings]] = field(default_factory=dict)  # keys: `memory_key`
    restoring: dict[int, Callable[[], None]] = field(default_factory=dict)


class LoadPlans:
    def __init__(self) -> None:
        self._plans: dict[Chunk, _Plan] = {}
        self._unconfirmed: dict[Chunk, _Plan] = {}
        self.refused: dict[Chunk, str] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def replay(self, received: ReceivedChunk) -> Findings | None:
        plan = self._plans.get(received.chunk)
        if plan is None:
            return None
        inspection = plan.prepared.get(received.memory_key)
        if inspection is None:
            tensors = received.read()
            copies = [Copy(index=c.index, source=c.source(tensors), target=c.target) for c in plan.copies]
            inspection = plan.prepared[received.memory_key] = prepare_inspection(tensors, copies)
        return inspection()

    def can_restore(self, chunk: Chunk) -> bool:
        """Not if another worker loads a part of a tensor."""
        return chunk in self._plans and self._plans[chunk].is_whole

    def restore(self, chunk: Chunk, block: torch.Tensor) -> None:
        """Copy what the plan has filled back into a block."""
        plan, key = self._plans[chunk], block.data_ptr()
        restore = plan.restoring.get(key)
        if restore is None:
            tensors = [view(entry, block) for entry in chunk.entries]
            copies = [Copy(index=c.index, source=c.target, target=c.source(tensors)) for c in plan.copies]
            restore = plan.restoring[key] = prepare_copies(copies)
        restore()

    def release(self) -> None:
        for plan in self._plans.values():
            plan.prepared.clear()
            plan.restoring.clear()

    @contextmanager
    def record(self, chunk: Chunk, tensors: Tensors) -> Iterator[None]:
        if chunk in self.refused:
            yield
            return
        sources = [tensor for _, tensor in tensors]
        recorder = _Recorder(sources)
        with recorder:
            yield
        if recorder.objection:
            self.refused[chunk] = recorder.objection
            return
        digests = [_digest(c.source(sources).to(c.target.dtype)) for c in recorder.copies]
        is_whole = all(_is_whole(i, source, recorder.copies) for i, source in enumerate(sources))
        self._unconfirmed[chunk] = _Plan(recorder.copies, digests, is_whole)

    def confirm(self, chunks: set[Chunk]) -> None:
        for chunk, plan in self._unconfirmed.items():
            found = [_digest(copy.target) for copy in plan.copies]
            if found and not torch.equal(torch.cat(found), torch.cat(plan.digests)):
                self.refused[chunk] = "a loaded tensor was changed after it had been copied"
            else:
                self._plans[chunk] = plan
                plan.digests.clear()
        self.discard()
        self._plans = {chunk: plan for chunk, plan in self._plans.items() if chunk in chunks}
        self.refused = {chunk: why for chunk, why in self.refused.items() if chunk in chunks}

    def discard(self) -> None:
        self._unconfirmed = {}

    def refuse(self, chunks: set[Chunk]) -> None:
        """A round left parameters unfilled."""
        self.discard()
        suspects = chunks & self._plans.keys()
        self.refused |= dict.fromkeys(suspects, "a round with it left parameters unfilled")
        self._plans = {chunk: plan for chunk, plan in self._plans.items() if chunk not in suspects}


class _Recorder(TorchDispatchMode):
    """Records this thread's `copies` out of `tensors`; `objection` is the first other operation."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        self.copies: list[PlannedCopy] = []
        self.objection = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.objection:
            self._inspect(func, args, kwargs or {}, result)
        return result

    def _inspect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func is _COPY and self._is_received(args[1]) and not self._is_received(args[0]):
            self._record_copy(args[0], args[1])
        elif func._schema.is_mutable:
            if args[0].numel() and not (func in _CONSTANTS and not self._is_received(args[0])):
                self.objection = f"{func} writes something other than a copy of a received tensor"
        elif any(map(self._is_received, tree_leaves((args, kwargs)))):
            results = tree_leaves(result)
            if not all(isinstance(leaf, torch.Tensor) and self._is_received(leaf) for leaf in results):
                self.objection = f"{func} computes from the received tensors"

    def _record_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.numel() == 0:
            return
        if source.shape != target.shape:
            self.objection = f"a copy of {list(source.shape)} to {list(target.shape)}"
            return
        address = source.data_ptr()
        for index, tensor in enumerate(self._tensors):
            start = tensor.data_ptr()
            if start <= address < start + tensor.numel() * tensor.itemsize and source.dtype == tensor.dtype:
                offset = (address - start) // tensor.itemsize
                shape, stride = tuple(source.shape), tuple(source.stride())
                self.copies.append(
                    PlannedCopy(
                        index=index, shape=shape, stride=stride, offset=offset, target=target.detach()
                    )
                )
                return
        self.objection = f"a copy of {source.dtype} elements that are not a view of one tensor"

    def _is_received(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._storages


def _is_whole(index: int, tensor: torch.Tensor, copies: Sequence[PlannedCopy]) -> bool:
    """Whether the targets of a tensor's copies, put together, are all of it."""
    end = 0
    for copy in sorted((copy for copy in copies if copy.index == index), key=lambda copy: copy.offset):
        part = copy.of(tensor)
        is_range = part.numel() == tensor.numel() or part.is_contiguous()
        if copy.target.dtype == tensor.dtype and is_range and copy.offset <= end:
            end = max(end, copy.offset + part.numel())
    return end == tensor.numel()


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    # One at a time: the copy of a strided tensor is freed before the next.
    return digest_tensor([tensor.contiguous()])
