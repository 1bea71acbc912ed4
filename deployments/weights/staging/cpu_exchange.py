"""What a swap on a CPU exchanges: the memory of parameters and buffers, and what vLLM made from the weights.

Modules and parameters stay the same objects, to which the KV cache, the runner and kernels refer. Attributes
that processing adds are found by comparing the live instance with one that was only constructed. Any other
difference is refused.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from deployments.weights.staging.base import tied_refusal
from deployments.weights.staging.observation import layout_of, other_layout
from deployments.weights.wire.checkpoint_schema import join_reasons

_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
_REGISTERED = ("_parameters", "_buffers", "_modules")
_KERNELS = ("moe_kernel", "moe_quant_config")
_EXCHANGED = (torch.Tensor, FunctionType, BuiltinFunctionType)
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attribute:
    live: Any
    twin: Any
    name: str

    def swap(self) -> None:
        ours, theirs = vars(self.live), vars(self.twin)
        ours[self.name], theirs[self.name] = theirs[self.name], ours[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """`attributes` and `parameters` are what processing adds."""

    path: str
    live: torch.nn.Module
    twin: torch.nn.Module
    attributes: list[_Attribute]
    parameters: list[str]


class Exchange:
    def __init__(self, live: torch.nn.Module, shadow: torch.nn.Module) -> None:
        twins = dict(shadow.named_modules())
        self._modules: list[_Module] = []
        problems: list[str] = []
        for path, module in live.named_modules():
            twin = twins.pop(path, None)
            if twin is None or type(twin) is not type(module):
                kind = "missing" if twin is None else f"a {type(twin).__name__}"
                problems.append(f"{path!r} is a {type(module).__name__} and there {kind}")
            elif twin is not module:  # else a rotary table, which vLLM makes once for all
                self._modules.append(_compared(path, module, twin, problems))
        problems += [f"{path!r} is not in the live model" for path in twins]
        if problems:
            raise ValueError(join_reasons(problems))
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._attributes: list[_Attribute] = []

    def collect(self, untouched: Collection[str]) -> None:
        """The second instance is loaded: find what to exchange, except at `untouched` paths."""
        tensors: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        attributes: list[_Attribute] = []
        problems: list[str] = []
        for module in self._modules:
            if module.path in untouched:
                continue
            for name, live, twin in _registered(module, problems):
                if not live.numel() and not twin.numel():
                    continue
                known = tensors.setdefault(id(live), (name, live, twin))
                if known[2] is not twin and not torch.equal(known[2], twin):
                    problems.append(tied_refusal(known[0], name))
                elif layout_of(live) != layout_of(twin):
                    problems.append(other_layout(name, layout_of(live), layout_of(twin)))
            for attribute in module.attributes:
                if vars(attribute.twin).get(attribute.name) is not None:
                    attributes.append(attribute)
                else:
                    problems.append(f"{module.path}.{attribute.name} was not made again")
        if problems:
            raise ValueError(join_reasons(problems))
        self._tensors = [(live, twin) for _, live, twin in tensors.values() if live is not twin]
        self._attributes = attributes

    def swap(self) -> None:
        for live, twin in self._tensors:
            live.data, twin.data = twin.data, live.data
        for attribute in self._attributes:
            attribute.swap()
        self._tensors, self._attributes = [], []

    def release(self) -> None:
        for module in self._modules:
            for attribute in module.attributes:
                vars(attribute.twin).pop(attribute.name, None)
            for name in module.parameters:
                module.twin._parameters.pop(name, None)


def _compared(path: str, live: torch.nn.Module, twin: torch.nn.Module, problems: list[str]) -> _Module:
    lost = twin._parameters.keys() - live._parameters.keys()
    lost |= live._buffers.keys() ^ twin._buffers.keys()
    problems += [f"{path}.{name} is not in both" for name in sorted(lost)]
    method = getattr(live, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        if type(method) not in _METHODS:
            problems.append(f"{path}.quant_method is a {type(method).__name__}")
        differing = _differing(method, twin.quant_method)
        problems += [f"{path}.quant_method.{name} comes from loading" for name, _ in differing]
    owners: list[tuple[str, Any, Any]] = [(path, live, twin)]
    if (kernel := getattr(live, "impl", None)) is not None:
        owners.append((f"{path}.impl", kernel, twin.impl))
    attributes = []
    for owner, one, other in owners:
        for name, value in _differing(one, other):
            added = getattr(other, name, None) is None and not isinstance(value, torch.nn.Parameter)
            if added and isinstance(value, _EXCHANGED):
                attributes.append(_Attribute(live=one, twin=other, name=name))
            else:
                problems.append(f"{owner}.{name} comes from loading")
    return _Module(
        path=path,
        live=live,
        twin=twin,
        attributes=attributes,
        parameters=sorted(live._parameters.keys() - twin._parameters.keys()),
    )


def _differing(live: Any, twin: Any) -> Iterator[tuple[str, Any]]:
    ours, theirs = vars(live), vars(twin)
    ignored = _REGISTERED + (_KERNELS if type(live) is UnquantizedFusedMoEMethod else ())
    for name in (ours.keys() | theirs.keys()) - set(ignored):
        one, other = ours.get(name), theirs.get(name)
        if other is None and isinstance(one, dict | list | set) and not one:
            continue  # the loader empties it
        if (one is None) != (other is None):
            yield name, one
        elif isinstance(one, torch.nn.Parameter) and isinstance(other, torch.nn.Parameter):
            continue  # exchanged where it is registered
        elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if layout_of(one) != layout_of(other) or not torch.equal(one, other):
                yield name, one
        elif isinstance(one, FunctionType) and isinstance(other, FunctionType):
            if one.__code__ is not other.__code__:
                yield name, one
        elif isinstance(one, _PLAIN) and one != other:
            yield name, one


def _registered(module: _Module, problems: list[str]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for group in ("_parameters", "_buffers"):
        theirs = vars(module.twin)[group]
        for name, tensor in vars(module.live)[group].items():
            twin = theirs.get(name)
            if tensor is not None and twin is not None:
                yield f"{module.path}.{name}", tensor, twin
            elif tensor is not twin:
                problems.append(f"{module.path}.{name} was not made again")
