"""What an instance of a model holds beside its parameters, at one moment."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deployments.weights.staging.model_state.reachable import Number, Way, reachable
from deployments.weights.wire.checkpoint_schema import join_reasons
from deployments.weights.wire.digest import digest_tensor

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A tensor as it was at one moment, without holding its memory."""

    layout: Layout
    address: int
    digest: int
    unwritten: bool  # every element is what torch fills new memory with, in a model built by `build_shadow`
    object: "weakref.ref[torch.Tensor]"

    def differs(self, other: "Content") -> bool:
        """Whether the two hold different numbers; memory that nobody has written holds none."""
        if self.unwritten or other.unwritten:
            return False
        return (self.layout, self.digest) != (other.layout, other.digest)

    def is_older(self, later: "Content") -> bool:
        """Whether the later state of the same instance is another tensor or has other content."""
        return self.differs(later) or self.object() is not later.object() or self.address != later.address


@dataclass(slots=True, kw_only=True)
class Observation:
    """What one instance held beside its parameters.

    Attributes:
        tensors: neither parameters nor buffers, nor views of them.
        buffers: those that no checkpoint contains.
        parameters: to see whether loading renews them.
    """

    tensors: dict[Way, Content] = field(default_factory=dict)
    buffers: dict[Way, Content] = field(default_factory=dict)
    parameters: dict[Way, Content] = field(default_factory=dict)
    numbers: dict[Way, Number] = field(default_factory=dict)
    closed: dict[Way, str] = field(default_factory=dict)


def observe(model: torch.nn.Module) -> Observation:
    """The state of an instance at this moment. Reads every tensor once."""
    found = reachable(model)
    parameters = {id(parameter) for parameter in model.parameters()}
    registered = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    transient = {
        id(module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set & module._buffers.keys()
    }
    covered = _Ranges(tensor for tensor in registered.values() if is_plain(tensor))
    seen = Observation(numbers=found.numbers, closed=found.closed)
    for way, tensor in found.tensors.items():
        if id(tensor) in parameters:
            seen.parameters[way] = _content(tensor)
        elif id(tensor) in transient:
            seen.buffers[way] = _content(tensor)
        elif id(tensor) not in registered and not covered.contain(tensor):
            seen.tensors[way] = _content(tensor)
    return seen


def changed_tensors(one: Observation, other: Observation) -> list[Way]:
    """The ways to the tensors beside the parameters that are in both and differ."""
    return changed(one.tensors | one.buffers, other.tensors | other.buffers)


def differing(one: Observation, other: Observation) -> list[Way]:
    """The ways to everything beside the parameters that is in both and differs."""
    return changed_tensors(one, other) + [
        way for way, n in one.numbers.items() if way in other.numbers and not same(n, other.numbers[way])
    ]


def changed(one: Mapping[Way, Content], other: Mapping[Way, Content]) -> list[Way]:
    return [way for way, content in one.items() if way in other and content.differs(other[way])]


def layout_of(tensor: Any) -> Layout:
    """What two tensors must have in common to be copied byte by byte."""
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.dim() else (), tensor.device


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has elements, in memory of its own."""
    return bool(tensor.numel()) and not tensor.is_meta and not hasattr(tensor, "__tensor_flatten__")


def same(one: Number, other: Number) -> bool:
    return one == other or (one != one and other != other)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which its elements lie."""
    spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (sum(spans) + 1) * tensor.itemsize


class _Ranges:
    """The memory of tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._by_storage: dict[int, list[tuple[int, int]]] = {}
        for tensor in tensors:
            self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(_range(tensor))

    def contain(self, tensor: torch.Tensor) -> bool:
        """Whether one of them has all elements of this one."""
        begin, end = _range(tensor)
        ranges = self._by_storage.get(tensor.untyped_storage().data_ptr(), [])
        return any(first <= begin and end <= last for first, last in ranges)


def _content(tensor: torch.Tensor) -> Content:
    plain = tensor.detach()
    digest = int(digest_tensor([plain.contiguous()])[0])
    return Content(
        layout=layout_of(plain),
        address=plain.data_ptr(),
        digest=digest,
        unwritten=_is_unwritten(plain),
        object=weakref.ref(tensor),
    )


def _is_unwritten(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point():
        first = tensor[(0,) * tensor.dim()].to(torch.float32)
        return bool(first.isnan()) and bool(tensor.to(torch.float32).isnan().all())
    if tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        return bool((tensor == torch.iinfo(tensor.dtype).max).all())
    return False


_LARGE_BYTES = 1 << 20
Place = tuple[int, Layout]  # address, and how it is laid out there


@dataclass
class Pairs:
    """Live tensors and their shadows, of equal dtype, shape and strides.

    Attributes:
        tied: two tensors of the shadow, with their names, that are one tensor of the live model.
    """

    large: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    small: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = field(
        default_factory=dict
    )
    tied: list[tuple[str, str, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, live: torch.Tensor, shadow: torch.Tensor) -> None:
        # The driver's copy of one large tensor reaches the bandwidth of the memory; the fused copy of many,
        # which saves launches, reaches two thirds of it.
        if live.numel() * live.itemsize >= _LARGE_BYTES and live.is_contiguous():
            self.large.append((live, shadow))
        else:
            to, source = self.small.setdefault((live.device, live.dtype), ([], []))
            to.append(live)
            source.append(shadow)

    def copy_to_live(self) -> None:
        for live, shadow in self.large:
            live.copy_(shadow)
        for live_ones, shadows in self.small.values():
            torch._foreach_copy_(live_ones, shadows)

    def copy_to_shadow(self) -> None:
        for live, shadow in self.large:
            shadow.copy_(live)
        for live_ones, shadows in self.small.values():
            torch._foreach_copy_(shadows, live_ones)
        for _, _, first, second in self.tied:
            second.copy_(first)

    def check_tied(self) -> None:
        """Check that what is one tensor of the live model is staged as equal tensors.

        Raises:
            ValueError: it is not; names them.
        """
        for first, second, one, other in self.tied:
            if not torch.equal(one, other):
                raise ValueError(
                    f"{first!r} and {second!r} were equal in the checkpoint that the engine started from, so "
                    "it has one tensor for both, and now they differ; start the engine from a checkpoint in "
                    "which they do"
                )


def pair(model: torch.nn.Module, shadow: torch.nn.Module) -> Pairs:
    """Every parameter and buffer that a swap copies: once, however many names it has (tied weights).

    Raises:
        ValueError: a tensor of the live model has no counterpart of its own with the same dtype, shape and
            strides.
    """
    shadows = dict(named_tensors(shadow))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pairs, problems = Pairs(), []
    seen: dict[Place, str] = {}  # names by the live tensor
    owners: dict[Place, str] = {}  # and by the shadow's
    for name, live in named_tensors(model):
        twin = shadows.get(name)
        if twin is None:
            problems.append(f"{name!r} has no counterpart")
            continue
        first = seen.setdefault((live.data_ptr(), layout_of(live)), name)
        if first != name:
            if twin.data_ptr() != shadows[first].data_ptr():
                pairs.tied.append((first, name, shadows[first], twin))
            continue
        owner = owners.setdefault((twin.data_ptr(), layout_of(twin)), name)
        if layout_of(live) != layout_of(twin):
            problems.append(
                f"{name!r} is {live.dtype} {list(live.shape)} {live.stride()} and its counterpart is "
                f"{twin.dtype} {list(twin.shape)} {twin.stride()}"
            )
        elif owner != name:
            problems.append(f"{name!r} and {owner!r} are one tensor there")
        elif live.data_ptr() != twin.data_ptr():
            pairs.add(live, twin)
        elif name in parameters:
            problems.append(f"{name!r} is one tensor of both")
    if problems:
        raise ValueError(
            "staging 'device' is not possible: a second instance of this model differs from the one that "
            f"serves: {join_reasons(problems)}; use 'host' or 'none'"
        )
    return pairs


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, under every name that they have."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            # A wrapper of other tensors has no memory of its own: `derived` pairs what it wraps.
            if tensor is not None and is_plain(tensor):
                yield f"{path}.{name}" if path else name, tensor.data
