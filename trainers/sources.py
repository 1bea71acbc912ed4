"""A model's parameters as its checkpoint has them: the names and shapes that vLLM loads.

transformers 5 holds some weights otherwise than checkpoints do (the experts of a layer fused into
one 3-D tensor, renamed modules) and knows the way back, which `save_pretrained` takes for the whole
model at once. Here the same way is taken one layer at a time, so that never more than one layer
exists twice, and where it leads to parts of what the model holds (`views`), it is not taken again.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainers.views import View, checkpoint_views

_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Tensors that are read together."""

    held: list[str]  # names in the model's state
    parts: list[tuple[ParameterSpec, View | None]]  # what is yielded, and where it lies
    converted: bool  # in every pass: it has no views


class ParameterSource:
    """The parameters of a plain or sharded (FSDP2) model; each iteration reads them anew.

    Sharded tensors are gathered as they come, and gathering is a collective: every rank must iterate,
    and to the end. What is yielded may be the model's own memory: it changes with the next step.

    Args:
        dtype: floating-point tensors are cast to it on their device; None leaves them.
    """

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> None:
        self._model = model
        self._dtype = dtype
        self._places: list[int] = []
        self._resident: list[torch.Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Of what is yielded."""
        return next(iter(self._model.parameters())).device

    def storages(self) -> frozenset[int]:
        """Addresses of the model's own memory. What is yielded from elsewhere was made for its reader."""
        whole = [t for t in self._model.state_dict().values() if not isinstance(t, DTensor)]
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in whole)

    def specs(self) -> list[ParameterSpec]:
        """What iteration will yield, in its order; gathers nothing."""
        return [spec for layer in self._layers for spec, _ in layer.parts]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Read anew: loading a state or sharding the model replaces tensors.
        state = self._model.state_dict()
        for layer in self._layers:
            held = {name: materialised(state[name]) for name in layer.held}
            if layer.converted:
                held = revert_weight_conversion(self._model, held)
            for spec, view in layer.parts:
                # What was converted is not held any longer than its reader wants it.
                tensor = held.pop(spec.name) if view is None else view.of(held[view.held].contiguous())
                yield spec.name, tensor.to(spec.dtype).contiguous()
            held.clear()  # before the next layer is gathered

    def resident(self) -> list[torch.Tensor] | None:
        """What a pass would yield, before it is cast, if all of it is the model's own memory; None where
        something is gathered or converted for its reader.

        The same list again for as long as the tensors stay where they are; their content is what it is
        when it is read.
        """
        state = self._model.state_dict()
        held = [state[name] for layer in self._layers for name in layer.held]
        if any(isinstance(tensor, DTensor) for tensor in held):
            return None
        places = [tensor.data_ptr() for tensor in held]
        if places != self._places:
            self._places, self._resident = places, self._own_memory(state)
        return self._resident

    def _own_memory(self, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        tensors: list[torch.Tensor] = []
        for _, view in (part for layer in self._layers for part in layer.parts):
            if view is None or not state[view.held].is_contiguous():
                return None
            tensor = view.of(state[view.held])
            if not tensor.is_contiguous() or tensor.device != self.device:
                return None
            tensors.append(tensor)
        return tensors

    @cached_property
    def _layers(self) -> list[_Layer]:
        state = self._model.state_dict()
        groups = layer_groups(_held_names(self._model))
        return [self._layer({name: state[name] for name in names}) for names in groups]

    def _layer(self, held: Mapping[str, torch.Tensor]) -> _Layer:
        empty = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in held.items()}
        converted = revert_weight_conversion(self._model, empty)
        specs = [
            ParameterSpec(name=name, dtype=self._wire_dtype(tensor), shape=tuple(tensor.shape))
            for name, tensor in converted.items()
        ]
        views = checkpoint_views(self._model, held) or []
        if [(view.name, view.shape) for view in views] == [(spec.name, spec.shape) for spec in specs]:
            return _Layer(held=list(held), parts=list(zip(specs, views, strict=True)), converted=False)
        return _Layer(held=list(held), parts=[(spec, None) for spec in specs], converted=True)

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype


def tied_names(model: PreTrainedModel) -> frozenset[str]:
    # Also listed where the configuration switches tying off, hence the second condition.
    keys = frozenset(getattr(model, "all_tied_weights_keys", None) or {})
    return keys if model.config.get_text_config().tie_word_embeddings else frozenset()


def materialised(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor; a collective if it is sharded (a DTensor)."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if callable(gather) else tensor.detach()


def _held_names(model: PreTrainedModel) -> list[str]:
    """Names in the model's state, without second names of the same weight."""
    left_out = tied_names(model) | frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return [name for name in model.state_dict() if name not in left_out]


def layer_groups(names: list[str]) -> list[list[str]]:
    """Names of one layer together, in order of first appearance; what belongs to no layer by itself."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        groups.setdefault(match.group(1) if match else name, []).append(name)
    return list(groups.values())


def load_parameters(model: PreTrainedModel, values: Mapping[str, torch.Tensor]) -> None:
    """Copy full tensors, named as in the model's state, into a plain or sharded model, in place.

    Raises:
        ValueError: a tensor is missing or has another shape; nothing has been changed then.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied_names(model)}
    wrong = [
        f"{name!r} must have shape {list(tensor.shape)}, "
        f"got {list(values[name].shape) if name in values else 'nothing'}"
        for name, tensor in state.items()
        if name not in values or values[name].shape != tensor.shape
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} tensors do not fit the model; the first: {wrong[0]}")
    with torch.no_grad():
        for name, tensor in state.items():
            value = values[name].to(tensor.device, tensor.dtype)
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
            tensor.copy_(value)
