"""A model's parameters with its checkpoint's names and shapes, as vLLM loads them. transformers 5 fuses
experts and renames modules: layers are converted back one at a time, unless the result is a view of the
model's memory."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainers.lora import LoraAdapter

# State tensors by name -> checkpoint tensors by name.
Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Inside a contiguous tensor of the state."""

    name: str
    state_name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    offset: int  # elements

    def of(self, containing: torch.Tensor) -> torch.Tensor:
        return containing.as_strided(self.shape, self.stride, containing.storage_offset() + self.offset)


def checkpoint_views(state: Mapping[str, torch.Tensor], convert: Convert) -> list[View] | None:
    """A layer's; None if one is computed. Reads dtypes and shapes of `state`."""
    meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in state.items()}
    names = {_storage(tensor): name for name, tensor in meta.items()}
    tracer = _SkipCopies()
    try:
        with tracer:
            converted = convert(meta)
    except RuntimeError:  # an operation needed the skipped copy
        return None
    if tracer.has_writes or any(_storage(tensor) not in names for tensor in converted.values()):
        return None
    return [
        View(
            name=name,
            state_name=names[_storage(tensor)],
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )
        for name, tensor in converted.items()
    ]


class _SkipCopies(TorchDispatchMode):
    """Returns the tensor itself for a clone; records in-place writes."""

    has_writes = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.has_writes = self.has_writes or func._schema.is_mutable
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


DRAFTER = "drafter."  # a drafter's, with a checkpoint of its own
MTP = "mtp."  # a drafter's, in the model's checkpoint
DRAFTERS = (DRAFTER, MTP)
_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    state_names: list[str]
    parts: list[tuple[ParameterSpec, View | None]]  # yielded, and where it lies
    is_converted: bool  # without views


class ParameterSource:
    """The parameters of a plain or sharded (FSDP2) model. An iteration reads current values layer by layer;
    all ranks must finish it. A yielded tensor may be the model's memory.

    Args:
        adapter: added to what is yielded.
        dtype: floating-point tensors are cast to it; None: no cast.
        convert: a layer's state to its checkpoint tensors; default: transformers' conversion.
        stored: names in the checkpoint; aliases of tied weights among them are yielded.
        drafter: by published names, in the model's memory or its device's; yielded after the model.
        frozen: tensors that only the checkpoint has; yielded last.

    Raises:
        ValueError: some parameters would not be yielded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        adapter: LoraAdapter | None = None,
        dtype: torch.dtype | None = None,
        convert: Convert | None = None,
        stored: Container[str] = (),
        drafter: Mapping[str, torch.Tensor] | None = None,
        frozen: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._model = model
        self._adapter = adapter
        self._stored = stored
        self._drafter = {} if drafter is None else drafter
        self._frozen = {} if frozen is None else frozen
        self._dtype = dtype
        self._convert = partial(revert_weight_conversion, model) if convert is None else convert
        self._addresses: list[int] = []
        self._resident: list[torch.Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return next(iter(self._model.parameters())).device

    def specs(self) -> list[ParameterSpec]:
        """In order; gathers nothing."""
        own = [spec for layer in self._layers for spec, _ in layer.parts]
        beside = [(name, tensor, self._wire_dtype(tensor)) for name, tensor in self._drafter.items()]
        beside += [(name, tensor, tensor.dtype) for name, tensor in self._frozen.items()]
        return own + [
            ParameterSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)) for name, tensor, dtype in beside
        ]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Not cached: sharding and loading replace tensors.
        state = self._state()
        for layer in self._layers:
            held = {name: self._whole(name, state[name], layer) for name in layer.state_names}
            if layer.is_converted:
                held = self._convert(held)
            for spec, view in layer.parts:
                # pop: frees a converted tensor once its reader drops it
                tensor = held.pop(spec.name) if view is None else view.of(held[view.state_name].contiguous())
                yield spec.name, tensor.to(spec.dtype).contiguous()
            held.clear()  # before the next gather
        for name, tensor in self._drafter.items():
            yield name, tensor.to(self._wire_dtype(tensor))
        for name, tensor in self._frozen.items():
            yield name, tensor.to(self.device)

    def _state(self, *, keep_vars: bool = False) -> dict[str, torch.Tensor]:
        if self._adapter is not None:
            return self._adapter.base_state(keep_vars=keep_vars)
        return self._model.state_dict(keep_vars=keep_vars)

    def _whole(self, name: str, tensor: torch.Tensor, layer: _Layer) -> torch.Tensor:
        delta = None if self._adapter is None else self._adapter.delta(name)
        if delta is not None:  # rounded once
            return (full_tensor(tensor) + delta).to(self._wire_dtype(tensor))
        if isinstance(tensor, DTensor) and not layer.is_converted:
            tensor = tensor.to(self._wire_dtype(tensor))  # gathers fewer bytes
        return full_tensor(tensor)

    def resident(self) -> list[torch.Tensor] | None:
        """The tensors before the cast; None if any is not in the model's memory. The same list while no
        tensor has moved."""
        if self._adapter is not None:
            return None  # sums are temporary
        state = self._state()
        held = [state[name] for layer in self._layers for name in layer.state_names]
        if any(isinstance(tensor, DTensor) for tensor in held):
            return None
        beside = (*self._drafter.values(), *self._frozen.values())
        addresses = [tensor.data_ptr() for tensor in (*held, *beside)]
        if addresses != self._addresses:
            self._addresses, self._resident = addresses, self._own_memory(state)
        return self._resident

    def _own_memory(self, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        tensors: list[torch.Tensor] = []
        for _, view in (part for layer in self._layers for part in layer.parts):
            if view is None or not state[view.state_name].is_contiguous():
                return None
            tensor = view.of(state[view.state_name])
            if not tensor.is_contiguous() or tensor.device != self.device:
                return None
            tensors.append(tensor)
        if self._frozen and self.device.type != "cpu":
            return None
        return [*tensors, *self._drafter.values(), *self._frozen.values()]

    @cached_property
    def _layers(self) -> list[_Layer]:
        state = self._state()
        names = names_without_aliases(self._model, state)
        names += [name for name in sorted(tied_names(self._model)) if self._is_stored(name, state[name])]
        groups = layer_groups(names)
        layers = [self._layer({name: state[name] for name in group}) for group in groups]
        adapted = () if self._adapter is None else self._adapter.parameters()
        check_complete(self._model, self._state(keep_vars=True), layers, besides=adapted)
        return layers

    def _is_stored(self, name: str, tensor: torch.Tensor) -> bool:
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return any(converted in self._stored for converted in self._convert({name: meta}))

    def _layer(self, state: Mapping[str, torch.Tensor]) -> _Layer:
        meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in state.items()}
        specs = [
            ParameterSpec(name=name, dtype=self._wire_dtype(tensor), shape=tuple(tensor.shape))
            for name, tensor in self._convert(meta).items()
        ]
        views = checkpoint_views(state, self._convert) or []
        if [(view.name, view.shape) for view in views] == [(spec.name, spec.shape) for spec in specs]:
            parts: list[tuple[ParameterSpec, View | None]] = list(zip(specs, views, strict=True))
            return _Layer(state_names=list(state), parts=parts, is_converted=False)
        return _Layer(state_names=list(state), parts=[(spec, None) for spec in specs], is_converted=True)

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype


def check_complete(
    model: PreTrainedModel,
    state: Mapping[str, torch.Tensor],
    layers: Sequence[_Layer],
    *,
    besides: Sequence[torch.Tensor] = (),
) -> None:
    """Raises ValueError unless all parameters, except `besides`, are yielded in full."""
    yielded = {id(state[name]) for layer in layers for name in layer.state_names}
    yielded |= {id(parameter) for parameter in besides}
    wrong = [name for name, parameter in model.named_parameters() if id(parameter) not in yielded]
    for layer in layers:
        held = sum(state[name].numel() for name in layer.state_names)
        if held != sum(prod(spec.shape) for spec, _ in layer.parts):
            wrong += layer.state_names
    if wrong:
        raise ValueError(f"{len(wrong)} of the model's parameters would not be sent, first {wrong[:5]}")


def tied_names(model: PreTrainedModel) -> frozenset[str]:
    """From the whole model's configuration: the text part's may differ (Qwen3-VL)."""
    return frozenset(model.all_tied_weights_keys)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def names_without_aliases(model: PreTrainedModel, state: Iterable[str] | None = None) -> list[str]:
    left_out = tied_names(model) | frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return [name for name in (model.state_dict() if state is None else state) if name not in left_out]


def layer_groups(names: list[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        groups.setdefault(match.group(1) if match else name, []).append(name)
    return list(groups.values())


def load_parameters(
    model: PreTrainedModel,
    values: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Whole or sharded like the model; `state` is without an adapter. Raises ValueError, without changes, for
    a missing tensor or another shape."""
    all_of_it = model.state_dict() if state is None else state
    state = {name: tensor for name, tensor in all_of_it.items() if name not in tied_names(model)}
    wrong = [
        f"{name!r} must have shape {list(tensor.shape)}, "
        f"got {list(values[name].shape) if name in values else 'nothing'}"
        for name, tensor in state.items()
        if name not in values or values[name].shape != tensor.shape
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} tensors do not match the model; the first: {wrong[0]}")
    with torch.no_grad():
        for name, tensor in state.items():
            value = values[name]
            if isinstance(tensor, DTensor):
                if not isinstance(value, DTensor):
                    value = value.to(tensor.device, tensor.dtype)
                    value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
                tensor, value = tensor.to_local(), value.to_local()
            tensor.copy_(value)
