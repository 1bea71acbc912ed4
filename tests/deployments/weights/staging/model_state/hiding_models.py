"""Small models that hide what they derive from their weights, each in another place."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


class Layer(torch.nn.Module):
    """A weight and whatever `hide` derives from it. Loading derives again."""

    def __init__(self, hide: Callable[[Any, torch.Tensor], None], seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.hide = hide
        self.load(seed)

    def load(self, seed: int) -> None:
        self.weight.data.copy_(torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)))
        self.hide(self, self.weight.data)


class Model(torch.nn.Module):
    def __init__(self, hide: Callable[[Any, torch.Tensor], None], seed: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(hide, seed), Layer(hide, seed + 100)])

    def load(self, seed: int) -> None:
        for index, layer in enumerate(self.layers):
            layer.load(seed + 100 * index)  # type: ignore[operator]


@dataclass
class Storage:
    data: torch.Tensor


class Wrapped:
    """As a kernel library wraps a tensor: no subclass, and no attribute of a module."""

    __slots__ = ("storage",)

    def __init__(self, data: torch.Tensor) -> None:
        self.storage = Storage(data)


class Kernel:
    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def as_attribute(layer: Any, weight: torch.Tensor) -> None:
    layer.transposed = weight.t().contiguous()


def in_containers(layer: Any, weight: torch.Tensor) -> None:
    layer.config = {"w": [(weight * 2,)], ("a", 1): weight * 3}


def wrapped(layer: Any, weight: torch.Tensor) -> None:
    layer.__dict__.pop("w13", None)
    layer.w13 = Wrapped(weight * 2)


def in_a_quantization_method(layer: Any, weight: torch.Tensor) -> None:
    layer.quant_method = SimpleNamespace(precision=Wrapped(weight * 2), kernel=Kernel(weight.sum(1)))


def in_a_closure(layer: Any, weight: torch.Tensor) -> None:
    packed = weight.t().contiguous()
    layer.linear = lambda x: x @ packed


def in_a_partial(layer: Any, weight: torch.Tensor) -> None:
    layer.linear = functools.partial(torch.mm, mat2=weight.t().contiguous())


def behind_a_method(layer: Any, weight: torch.Tensor) -> None:
    layer.run = Kernel(weight.sum(1)).apply


def in_a_module_outside_the_tree(layer: Any, weight: torch.Tensor) -> None:
    inner = torch.nn.Linear(6, 4, bias=False)
    inner.weight.data.copy_(weight * 2)
    layer.others = (inner,)


def on_a_parameter(layer: Any, weight: torch.Tensor) -> None:
    layer.weight.scale = weight.amax(1)


def in_numpy(layer: Any, weight: torch.Tensor) -> None:
    layer.table_of_scales = weight.sum(1).double().numpy() + 1


def as_a_float(layer: Any, weight: torch.Tensor) -> None:
    layer._k_scale_float = float(weight.max())


def as_a_whole_number(layer: Any, weight: torch.Tensor) -> None:
    layer.holder = {"largest": int(weight.max() * 1e6)}


HIDING = [
    as_attribute,
    in_containers,
    wrapped,
    in_a_quantization_method,
    in_a_closure,
    in_a_partial,
    behind_a_method,
    in_a_module_outside_the_tree,
    on_a_parameter,
    in_numpy,
    as_a_float,
    as_a_whole_number,
]
