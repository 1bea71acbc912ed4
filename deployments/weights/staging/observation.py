"""What an instance of a model holds at one moment, without holding its memory."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deployments.weights.staging.reachable import AccessPath, Number, reachable
from deployments.weights.wire.digest import digest_tensor

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    layout: Layout
    address: int
    digest: int
    unwritten: bool  # every element is what `build_shadow` fills new memory with
    object: "weakref.ref[torch.Tensor]"

    def differs(self, other: "Content") -> bool:
        """Whether the two hold different numbers; unwritten memory holds none."""
        if self.unwritten or other.unwritten:
            return False
        return (self.layout, self.digest) != (other.layout, other.digest)

    def is_older(self, later: "Content") -> bool:
        return self.differs(later) or self.object() is not later.object() or self.address != later.address


@dataclass(slots=True, kw_only=True)
class Observation:
    # Neither parameters nor buffers, nor views of them.
    tensors: dict[AccessPath, Content] = field(default_factory=dict)
    buffers: dict[AccessPath, Content] = field(default_factory=dict)  # the non-persistent ones
    parameters: dict[AccessPath, Content] = field(default_factory=dict)
    numbers: dict[AccessPath, Number] = field(default_factory=dict)
    closed: dict[AccessPath, str] = field(default_factory=dict)

    @property
    def derivable(self) -> dict[AccessPath, Content]:
        return self.tensors | self.buffers


def observe(model: torch.nn.Module) -> Observation:
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
    for path, tensor in found.tensors.items():
        if id(tensor) in parameters:
            seen.parameters[path] = _content(tensor)
        elif id(tensor) in transient:
            seen.buffers[path] = _content(tensor)
        elif id(tensor) not in registered and not covered.contain(tensor):
            seen.tensors[path] = _content(tensor)
    return seen


def changed_tensors(one: Observation, other: Observation) -> list[AccessPath]:
    return changed(one.derivable, other.derivable)


def differing(one: Observation, other: Observation) -> list[AccessPath]:
    return changed_tensors(one, other) + [
        path for path, n in one.numbers.items() if path in other.numbers and not same(n, other.numbers[path])
    ]


def changed(one: Mapping[AccessPath, Content], other: Mapping[AccessPath, Content]) -> list[AccessPath]:
    return [path for path, content in one.items() if path in other and content.differs(other[path])]


def layout_of(tensor: Any) -> Layout:
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.dim() else (), tensor.device


def other_layout(name: str, live: Layout, second: Layout) -> str:
    (dtype, shape, stride, device), (dtype_2, shape_2, stride_2, device_2) = live, second
    return (
        f"{name!r} is {dtype} {list(shape)} {stride} on {device} and in the second instance "
        f"{dtype_2} {list(shape_2)} {stride_2} on {device_2}"
    )


def is_plain(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and not tensor.is_meta and not hasattr(tensor, "__tensor_flatten__")


def same(one: Number, other: Number) -> bool:
    return one == other or (one != one and other != other)


class _Ranges:
    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._by_storage: dict[int, list[tuple[int, int]]] = {}
        for tensor in tensors:
            self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(_range(tensor))

    def contain(self, tensor: torch.Tensor) -> bool:
        begin, end = _range(tensor)
        ranges = self._by_storage.get(tensor.untyped_storage().data_ptr(), [])
        return any(first <= begin and end <= last for first, last in ranges)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (sum(spans) + 1) * tensor.itemsize


def _content(tensor: torch.Tensor) -> Content:
    plain = tensor.detach()
    return Content(
        layout=layout_of(plain),
        address=plain.data_ptr(),
        digest=int(digest_tensor([plain.contiguous()])[0]),
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
