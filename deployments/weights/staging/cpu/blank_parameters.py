"""The parameters of a second instance before its weights are processed, and which of them were loaded.

Between rounds they have no memory. While a version is loaded, what is not written yet can be told from what
is: the first and the last column of every parameter are NaN. No version has a NaN: the digests refuse it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import torch


class Loaded(Enum):
    """How much of a parameter was loaded."""

    NOTHING = auto()
    PART = auto()
    ALL = auto()


@dataclass(slots=True, kw_only=True)
class BlankParameter:
    """One parameter, as the model's constructor made it.

    Attributes:
        places: the modules that have it, with their path and its name there; several if weights are tied.
    """

    parameter: torch.nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    places: list[tuple[str, torch.nn.Module, str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Its name in the model; several if weights are tied."""
        return [f"{path}.{name}" if path else name for path, _, name in self.places]

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.parameter.itemsize

    def place(self, memory: torch.Tensor) -> None:
        """Put it where its modules had it before they were processed, with this memory."""
        self.parameter.data = memory
        for _, module, name in self.places:
            module._parameters[name] = self.parameter

    def loaded(self) -> Loaded:
        missing = _columns(self.parameter.data).isnan()
        if not missing.any():
            return Loaded.ALL
        return Loaded.NOTHING if missing.all() else Loaded.PART

    def pad(self) -> None:
        """Zero what was not loaded of it: padding, which no checkpoint contains."""
        data = self.parameter.data
        if data.dim() > 1:
            data[data[..., 0].isnan()] = 0  # the columns between were never written either
        data.masked_fill_(data.isnan(), 0)


class BlankParameters:
    """The parameters of an instance that was constructed and not processed. They have no memory at first."""

    def __init__(self, model: torch.nn.Module) -> None:
        blanks: dict[int, BlankParameter] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    new = BlankParameter(
                        parameter=parameter, shape=parameter.shape, stride=parameter.stride()
                    )
                    blanks.setdefault(id(parameter), new).places.append((path, module, name))
        self._blanks = list(blanks.values())
        self.release()

    def __iter__(self) -> Iterator[BlankParameter]:
        return iter(self._blanks)

    def allocate(self) -> None:
        """Give all of them memory, with NaN in its first and last columns."""
        for blank in self._blanks:
            dtype = blank.parameter.dtype
            memory = torch.empty_strided(blank.shape, blank.stride, dtype=dtype)
            _columns(memory).fill_(float("nan") if dtype.is_floating_point else 0)
            blank.place(memory)

    def release(self) -> None:
        """Free the memory of all parameters, also of those that processing made."""
        for blank in self._blanks:
            blank.place(torch.empty(0, dtype=blank.parameter.dtype))


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    """The first and the last column, or the tensor itself if it has only one; a view."""
    if tensor.dim() > 1 and tensor.shape[-1] > 1:
        return tensor[..., :: tensor.shape[-1] - 1]
    return tensor
