"""The tensors and numbers that a model computes with, and the path to each. vLLM's layers keep what they
derive from weights in attributes, lists, quantization methods, kernels, wrappers, closures and floats."""

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
    name: str

    def get(self, owner: Any) -> Any:
        # getattr may find a property of that name.
        own = getattr(owner, "__dict__", {})
        return own[self.name] if self.name in own else getattr(owner, self.name)

    def set(self, owner: Any, value: Any) -> None:
        setattr(owner, self.name, value)

    def __str__(self) -> str:
        return f".{self.name}"


@dataclass(frozen=True, slots=True)
class Item:
    key: Hashable

    def get(self, owner: Any) -> Any:
        return owner[self.key]

    def set(self, owner: Any, value: Any) -> None:
        owner[self.key] = value

    def __str__(self) -> str:
        return f"[{self.key!r}]"


IN_SET = Item(...)  # cannot be followed: a set has no order
AccessPath = tuple[Attribute | Item, ...]


def path_name(path: AccessPath) -> str:
    return "".join(map(str, path)).lstrip(".")


def resolve(root: Any, path: AccessPath) -> Any:
    """Raises LookupError if nothing is there."""
    found = root
    for step in path:
        try:
            found = step.get(found)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise LookupError(f"{path_name(path)!r} does not exist at {str(step)!r}") from error
    return found


def tensor_at(root: Any, path: AccessPath) -> torch.Tensor:
    """Raises LookupError."""
    found = resolve(root, path)
    if isinstance(found, np.ndarray):
        return torch.from_numpy(found)
    if not isinstance(found, torch.Tensor):
        raise LookupError(f"{path_name(path)!r} is a {type(found).__name__}")
    return found.detach()


def assign(root: Any, path: AccessPath, value: Any) -> None:
    """Raises TypeError if the owner is immutable."""
    owner = resolve(root, path[:-1])
    try:
        path[-1].set(owner, value)
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{path_name(path)!r} cannot be changed: {error}") from error


@dataclass(slots=True, kw_only=True)
class Reachable:
    """Each thing once, by the first path to it."""

    tensors: dict[AccessPath, torch.Tensor] = field(default_factory=dict)
    numbers: dict[AccessPath, Number] = field(default_factory=dict)
    # Objects of compiled libraries, which may hold tensors out of sight.
    closed: dict[AccessPath, str] = field(default_factory=dict)


_LEAVES = (
    type,
    types.ModuleType,
    types.CodeType,
    types.BuiltinFunctionType,
    types.GeneratorType,
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
# Not read by a forward pass: torch.compile's numbering, parameter loaders, and the mark that vLLM's GPU
# runner sets on a loaded drafter's attention, which a second instance lacks.
_NOT_COMPUTED_WITH = ("_torchdynamo", "weight_loader", "is_draft_layer")
# Nothing from a checkpoint; vLLM's configurations refer to the layers of every model.
_OTHER = (
    "vllm.config",
    "vllm.distributed",
    "vllm.platforms",
    "transformers.",
    "torch._dynamo",
    "torch.distributed",
    "torch.utils.hooks",
)
_HELD: tuple[tuple[type, tuple[str, ...]], ...] = (
    (types.FunctionType, ("__closure__", "__defaults__", "__kwdefaults__")),
    (types.CellType, ("cell_contents",)),
    (types.MethodType, ("__self__", "__func__")),
    (functools.partial, ("func", "args", "keywords")),
)


def reachable(model: torch.nn.Module) -> Reachable:
    found = Reachable()
    # Modules first: everything else refers to them.
    modules = dict(model.named_modules())
    seen: dict[int, Any] = {id(module): module for module in modules.values()}  # held: ids stay unique
    for name, module in modules.items():
        start: AccessPath = tuple(Attribute(part) for part in name.split(".")) if name else ()
        waiting = _parts(start, module)
        while waiting:
            path, value = waiting.pop()
            if isinstance(value, Number | np.generic):
                found.numbers[path] = value.item() if isinstance(value, np.generic) else value
            elif value is not None and not isinstance(value, _LEAVES) and id(value) not in seen:
                seen[id(value)] = value
                waiting += _visit(path, value, found)
    return found


def _visit(path: AccessPath, value: Any, found: Reachable) -> list[tuple[AccessPath, Any]]:
    tensor = value if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value) else None
    if isinstance(value, np.ndarray) and value.size and value.dtype != object:
        tensor = torch.from_numpy(value)
    if tensor is not None:
        if tensor.numel() and not tensor.is_meta:
            found.tensors[path] = tensor
    elif isinstance(value, torch.ScriptObject | torch.UntypedStorage | torch.TypedStorage):
        found.closed[path] = f"{type(value).__module__}.{type(value).__qualname__}"
        return []
    elif type(value).__module__.startswith(_OTHER):
        return []
    parts = _parts(path, value)
    if isinstance(value, QuantizationConfig):  # its numbers are settings and statistics
        parts = [(below, part) for below, part in parts if not isinstance(part, Number)]
    return parts


def _parts(path: AccessPath, value: Any) -> list[tuple[AccessPath, Any]]:
    below: list[tuple[Attribute | Item, Any]] = [*_items(value), *_attributes(value)]
    return [((*path, step), part) for step, part in reversed(below)]


def _items(value: Any) -> Iterator[tuple[Item, Any]]:
    if isinstance(value, Mapping) and not isinstance(value, torch.nn.Module):
        yield from ((Item(key), part) for key, part in list(value.items()))
    elif isinstance(value, list | tuple | deque):
        yield from ((Item(index), part) for index, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((IN_SET, part) for part in value if not isinstance(part, Number))


def _attributes(value: Any) -> Iterator[tuple[Attribute, Any]]:
    names = [name for kind, held in _HELD if isinstance(value, kind) for name in held]
    if is_traceable_wrapper_subclass(value):
        names += value.__tensor_flatten__()[0]
    for name in names:
        with suppress(ValueError):  # a variable that was never set
            yield Attribute(name), getattr(value, name)
    own = getattr(value, "__dict__", None)
    attributes = dict(own) if isinstance(own, dict) else {}
    if isinstance(value, torch.nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            attributes |= attributes.pop(group, {})
    computed = (name for name in attributes if not str(name).startswith(_NOT_COMPUTED_WITH))
    yield from ((Attribute(name), attributes[name]) for name in computed)
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield Attribute(name), getattr(value, name)
