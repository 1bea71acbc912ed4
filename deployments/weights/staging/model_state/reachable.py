"""Everything a model computes with: the tensors and numbers that can be reached from it, and the way to each.

vLLM's layers keep what they derive from weights in more places than parameters and buffers: plain attributes,
lists, quantization methods, kernels, wrappers of other libraries, closures, Python floats. The walk goes
through all of them. Two instances of one model have the same ways, so a way found in one leads to the same
thing in the other.
"""

import functools
import logging
import threading
import types
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

Number = bool | int | float | complex


@dataclass(frozen=True, slots=True)
class Attribute:
    """`owner.name`."""

    name: str

    def of(self, owner: Any) -> Any:
        # Not getattr alone: a property of the same name would compute something else.
        own = getattr(owner, "__dict__", {})
        return own[self.name] if self.name in own else getattr(owner, self.name)

    def put(self, owner: Any, value: Any) -> None:
        setattr(owner, self.name, value)

    def __str__(self) -> str:
        return f".{self.name}"


@dataclass(frozen=True, slots=True)
class Item:
    """`owner[key]`."""

    key: Hashable

    def of(self, owner: Any) -> Any:
        return owner[self.key]

    def put(self, owner: Any, value: Any) -> None:
        owner[self.key] = value

    def __str__(self) -> str:
        return f"[{self.key!r}]"


@dataclass(frozen=True, slots=True)
class Cell:
    """A variable that a function closes over."""

    index: int

    def of(self, owner: Any) -> Any:
        return owner.__closure__[self.index].cell_contents

    def put(self, owner: Any, value: Any) -> None:
        owner.__closure__[self.index].cell_contents = value

    def __str__(self) -> str:
        return f".<closure {self.index}>"


@dataclass(frozen=True, slots=True)
class Element:
    """Of a set, which has no order: nothing of another instance corresponds to it."""

    def of(self, owner: Any) -> Any:
        raise LookupError("elements of sets have no place")

    def put(self, owner: Any, value: Any) -> None:
        raise TypeError("elements of sets have no place")

    def __str__(self) -> str:
        return "{...}"


Step = Attribute | Item | Cell | Element
Way = tuple[Step, ...]


def name_of(way: Way) -> str:
    """The way in words, as Python would write it where it can."""
    return "".join(map(str, way)).lstrip(".")


def follow(root: Any, way: Way) -> Any:
    """What the way leads to.

    Raises:
        LookupError: it leads nowhere in this instance.
    """
    found = root
    for step in way:
        try:
            found = step.of(found)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise LookupError(f"{name_of(way)!r} leads nowhere at {str(step)!r}") from error
    return found


def tensor_at(root: Any, way: Way) -> torch.Tensor:
    """The tensor, or numpy's array as one, that the way leads to, without its history.

    Raises:
        LookupError: the way leads nowhere, or to something else.
    """
    found = follow(root, way)
    if isinstance(found, np.ndarray):
        return torch.from_numpy(found)
    if not isinstance(found, torch.Tensor):
        raise LookupError(f"{name_of(way)!r} leads to a {type(found).__name__}")
    return found.detach()


def put(root: Any, way: Way, value: Any) -> None:
    """Replace what the way leads to.

    Raises:
        TypeError: its owner cannot be changed (a tuple, a frozen dataclass).
    """
    owner = follow(root, way[:-1])
    try:
        way[-1].put(owner, value)
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{name_of(way)!r} cannot be changed: {error}") from error


@dataclass(slots=True, kw_only=True)
class Reachable:
    """What a model reaches, each thing once, by the first way to it.

    Attributes:
        tensors: with memory, and not empty.
        numbers: Python's, and numpy's.
        closed: objects of compiled libraries that may hold tensors which nobody can see.
    """

    tensors: dict[Way, torch.Tensor] = field(default_factory=dict)
    numbers: dict[Way, Number] = field(default_factory=dict)
    closed: dict[Way, str] = field(default_factory=dict)


# Never holders of weights: code, and what runs it.
_CODE = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.GeneratorType)
_LEAVES = (
    str,
    bytes,
    bytearray,
    torch.dtype,
    torch.device,
    torch.layout,
    Enum,
    logging.Logger,
    threading.Thread,
)
# Attributes that no forward pass reads: torch.compile's own numbering, and what fills a parameter.
_NOT_COMPUTED_WITH = ("_torchdynamo", "weight_loader")
# Packages whose objects describe or connect; their buffers hold nothing that comes from a checkpoint. vLLM's
# configurations also refer to the layers of every model of the process.
_OTHER = (
    "vllm.config",
    "vllm.distributed",
    "vllm.platforms",
    "transformers.",
    "torch._dynamo",
    "torch.distributed",
    "torch.utils.hooks",
)


def reachable(model: torch.nn.Module) -> Reachable:
    """Walk from a model."""
    return _Walk(model).found


class _Walk:
    def __init__(self, model: torch.nn.Module) -> None:
        self.found = Reachable()
        self._seen: set[int] = set()
        self._held: list[Any] = []  # the walk's own temporaries: an id must not be used twice
        # Modules first, by their path in the model: they are what everything else refers to.
        modules = {id(module): path for path, module in model.named_modules()}
        self._seen |= modules.keys()
        for path, module in model.named_modules():
            steps: Way = tuple(Attribute(part) for part in path.split(".")) if path else ()
            for step, value in _parts(module):
                self._visit((*steps, step), value)

    def _visit(self, start: Way, value: Any) -> None:
        waiting: list[tuple[Way, Any]] = [(start, value)]
        while waiting:
            way, value = waiting.pop()
            if isinstance(value, Number | np.generic):
                self.found.numbers[way] = value.item() if isinstance(value, np.generic) else value
                continue
            if value is None or isinstance(value, _CODE + _LEAVES) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._held.append(value)
            if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value):
                self._add_tensor(way, value)
            elif isinstance(value, np.ndarray) and value.size and value.dtype != object:
                self._add_tensor(way, torch.from_numpy(value))
            elif isinstance(value, torch.ScriptObject | torch.UntypedStorage | torch.TypedStorage):
                self.found.closed[way] = f"{type(value).__module__}.{type(value).__qualname__}"
                continue
            elif type(value).__module__.startswith(_OTHER):
                continue
            parts = reversed(list(_parts(value)))
            if isinstance(value, QuantizationConfig):  # its numbers are settings and statistics
                parts = ((step, part) for step, part in parts if not isinstance(part, Number))
            waiting += [((*way, step), part) for step, part in parts]

    def _add_tensor(self, way: Way, tensor: torch.Tensor) -> None:
        if tensor.numel() and not tensor.is_meta:
            self.found.tensors[way] = tensor


def _parts(value: Any) -> Iterator[tuple[Step, Any]]:
    """What an object consists of, one step further."""
    if isinstance(value, Mapping) and not isinstance(value, torch.nn.Module):
        yield from ((Item(key), part) for key, part in list(value.items()))
    elif isinstance(value, list | tuple | deque):
        yield from ((Item(index), part) for index, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((Element(), part) for part in value if not isinstance(part, Number))
    elif isinstance(value, types.FunctionType):
        for index, cell in enumerate(value.__closure__ or ()):
            with suppress(ValueError):  # a variable that was never set
                yield Cell(index), cell.cell_contents
        for name in ("__defaults__", "__kwdefaults__"):
            yield Attribute(name), getattr(value, name)
    elif isinstance(value, types.MethodType):
        yield Attribute("__self__"), value.__self__
        yield Attribute("__func__"), value.__func__
    elif isinstance(value, functools.partial):
        yield from ((Attribute(name), getattr(value, name)) for name in ("func", "args", "keywords"))
    elif is_traceable_wrapper_subclass(value):
        yield from ((Attribute(name), getattr(value, name)) for name in value.__tensor_flatten__()[0])
    yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[Step, Any]]:
    own = getattr(value, "__dict__", None)
    held = dict(own) if isinstance(own, dict) else {}
    if isinstance(value, torch.nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            held |= held.pop(group, {})
    computed = (name for name in held if not str(name).startswith(_NOT_COMPUTED_WITH))
    yield from ((Attribute(name), held[name]) for name in computed)
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield Attribute(name), getattr(value, name)
