"""Where the tensors of a checkpoint lie in those that a model holds.

transformers' way back to a checkpoint's names is Python for every layer and copies fused experts to take
them apart. Nearly always what comes out is a part of what went in. So the way is walked once, with
tensors that have no content: a result that still lies in the memory of an input is a view of it, and
from then on it is taken as one. A layer in which anything is computed has no views.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor of the checkpoint, inside the contiguous tensor that the model holds under `held`."""

    name: str
    held: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # numbers, from the held tensor's first

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


def checkpoint_views(model: PreTrainedModel, held: Mapping[str, torch.Tensor]) -> list[View] | None:
    """The views of one layer's tensors, in the order of `revert_weight_conversion`; None if it has none.

    Args:
        held: by their names in the model's state; only dtypes and shapes are read.
    """
    empty = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in held.items()}
    names = {_storage(tensor): name for name, tensor in empty.items()}
    watcher = _WithoutCopies()
    try:
        with watcher:
            converted = revert_weight_conversion(model, empty)
    except RuntimeError:  # what follows needs the copy that was left out
        return None
    if watcher.writes or any(_storage(tensor) not in names for tensor in converted.values()):
        return None
    return [
        View(
            name=name,
            held=names[_storage(tensor)],
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )
        for name, tensor in converted.items()
    ]


class _WithoutCopies(TorchDispatchMode):
    """Gives a tensor itself where it would be copied; notes whether anything is written in place."""

    writes = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.writes = self.writes or func._schema.is_mutable
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
