"""Views of a checkpoint's tensors inside the tensors that a model holds.

transformers' conversion to checkpoint names runs Python code for every layer, and copies fused experts
to split them. Nearly always the result is a slice of the input. So the conversion is traced once, on
meta tensors: an output that shares storage with an input is recorded as a view of it, and later passes
take the view instead of converting. A layer in which anything is computed has no views.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Tensors by their names in the model's state -> tensors by their names in its checkpoint.
Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A checkpoint tensor inside a contiguous tensor of the model's state."""

    name: str  # in the checkpoint
    state_name: str  # of the tensor that contains it
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    offset: int  # in elements, from the first of the containing tensor

    def of(self, containing: torch.Tensor) -> torch.Tensor:
        """The view of the tensor named `state_name`; shares its memory."""
        return containing.as_strided(self.shape, self.stride, containing.storage_offset() + self.offset)


def checkpoint_views(state: Mapping[str, torch.Tensor], convert: Convert) -> list[View] | None:
    """The views of one layer's checkpoint tensors, in the order of `convert`.

    Args:
        state: the layer's tensors by their names in the model's state; only dtypes and shapes are read.

    Returns:
        None if an output is computed, so that at least one tensor is not a view.
    """
    meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in state.items()}
    names = {_storage(tensor): name for name, tensor in meta.items()}
    tracer = _SkipCopies()
    try:
        with tracer:
            converted = convert(meta)
    except RuntimeError:  # a later operation needs the copy that was skipped
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
    """Returns the tensor itself where it would be cloned; records whether anything is written in place."""

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
