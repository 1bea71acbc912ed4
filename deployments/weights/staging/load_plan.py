"""What vLLM's loaders did with a chunk: watched once, then done again without them.

Loading tensor by tensor is Python, and Python beside the thread that decodes slows it down. Most
loaders only copy views of what came to views of the model's parameters. So while a chunk is loaded
for the first time, every operation on tensors is watched; if all of them were such copies, they are the
chunk's plan, and from then on they are made together with the digests, a few calls a chunk.

A plan is trusted when, at the end of its first round, each of its targets holds the bytes of its
source. A chunk in which anything else happened (a computation, a number read on the host) has no plan
and is loaded by vLLM in every round.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deployments.weights.wire.chunk_layout import Chunk
from deployments.weights.wire.digest import digest_tensor, prepare_inspection
from deployments.weights.wire.digest_definition import Copy, Findings
from deployments.weights.wire.received_chunk import ReceivedChunk

Tensors = list[tuple[str, torch.Tensor]]

_COPY = torch.ops.aten.copy_.default
_CONSTANTS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)  # what pads a vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One copy: from a view of the chunk's tensor `place` to `target`, a part of the model."""

    place: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # numbers, from the tensor's first
    target: torch.Tensor

    def source(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = tensors[self.place]
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass(slots=True)
class _Plan:
    steps: list[Step]
    ready: dict[int, Callable[[], Findings]] = field(default_factory=dict)  # by the arrival's place


@dataclass(slots=True)
class _Recording:
    chunk: Chunk
    steps: list[Step] = field(default_factory=list)
    digests: list[torch.Tensor] = field(default_factory=list)  # of the steps' sources


class LoadPlans:
    """The plans of the chunks that have come so far. Used on the staging thread, under its stream."""

    def __init__(self) -> None:
        self._plans: dict[Chunk, _Plan] = {}
        self._recordings: list[_Recording] = []
        self.refused: dict[Chunk, str] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def replay(self, arrival: ReceivedChunk) -> Findings | None:
        """Load the chunk and look into its tensors; None if it has no plan, and nothing was done."""
        plan = self._plans.get(arrival.chunk)
        if plan is None:
            return None
        find = plan.ready.get(arrival.memory_key)
        if find is None:
            tensors = arrival.read()
            copies = [Copy(index=s.place, source=s.source(tensors), target=s.target) for s in plan.steps]
            find = plan.ready[arrival.memory_key] = prepare_inspection(tensors, copies)
        return find()

    def release(self) -> None:
        """Keep no memory of arrivals; the plans stay."""
        for plan in self._plans.values():
            plan.ready.clear()

    @contextmanager
    def watch(self, chunk: Chunk, tensors: Tensors) -> Iterator[None]:
        """The chunk is loaded inside, from its tensors."""
        if chunk in self.refused:
            yield
            return
        watcher = _Watcher([tensor for _, tensor in tensors])
        with watcher:
            yield
        if watcher.objection:
            self.refused[chunk] = watcher.objection
            return
        recording = _Recording(chunk, watcher.steps)
        whole = [tensor for _, tensor in tensors]
        recording.digests = [_digest(s.source(whole).to(s.target.dtype)) for s in watcher.steps]
        self._recordings.append(recording)

    def settle(self) -> None:
        """A round is complete: trust what was recorded in it, if the bytes say the same."""
        recordings, self._recordings = self._recordings, []
        for recording in recordings:
            found = [_digest(step.target) for step in recording.steps]
            if found and not torch.equal(torch.cat(found), torch.cat(recording.digests)):
                self.refused[recording.chunk] = "a loaded tensor was changed after it had been copied"
            else:
                self._plans[recording.chunk] = _Plan(recording.steps)

    def discard(self) -> None:
        """The round did not come to its end."""
        self._recordings = []

    def distrust(self, chunks: set[Chunk]) -> None:
        """A round of these chunks left parameters unfilled: plans among theirs may be why."""
        self.discard()
        suspects = chunks & self._plans.keys()
        self.refused |= dict.fromkeys(suspects, "a round with it left parameters unfilled")
        self._plans = {chunk: plan for chunk, plan in self._plans.items() if chunk not in suspects}

    def keep_only(self, chunks: set[Chunk]) -> None:
        """Forget chunks of layouts that come no more."""
        self._plans = {chunk: plan for chunk, plan in self._plans.items() if chunk in chunks}
        self.refused = {chunk: why for chunk, why in self.refused.items() if chunk in chunks}


class _Watcher(TorchDispatchMode):
    """Sees every operation on this thread; `steps` are the copies out of `tensors`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        self.steps: list[Step] = []
        self.objection = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.objection:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func is _COPY and self._is_ours(args[1]) and not self._is_ours(args[0]):
            self._note_copy(args[0], args[1])
        elif func._schema.is_mutable:
            if args[0].numel() and not (func in _CONSTANTS and not self._is_ours(args[0])):
                self.objection = f"{func} writes what is not a copy"
        elif any(map(self._is_ours, _tensors_in((args, kwargs)))):
            made = tree_leaves(result)
            if not all(isinstance(leaf, torch.Tensor) and self._is_ours(leaf) for leaf in made):
                self.objection = f"{func} computes from what came"

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.numel() == 0:
            return
        if source.shape != target.shape:
            self.objection = f"a copy of {list(source.shape)} to {list(target.shape)}"
            return
        address = source.data_ptr()
        for place, tensor in enumerate(self._tensors):
            start = tensor.data_ptr()
            if start <= address < start + tensor.numel() * tensor.itemsize and source.dtype == tensor.dtype:
                offset = (address - start) // tensor.itemsize
                shape, stride = tuple(source.shape), tuple(source.stride())
                self.steps.append(
                    Step(place=place, shape=shape, stride=stride, offset=offset, target=target.detach())
                )
                return
        self.objection = f"a copy of {source.dtype} numbers from between the tensors"

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._storages


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    # One at a time: a strided one is copied for it, and the copy is gone before the next.
    return digest_tensor([tensor.contiguous()])
