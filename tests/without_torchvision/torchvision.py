"""What images of Qwen's families need of torchvision, of which there is no build beside torch's CPU build.

On PYTHONPATH of processes that read images. In all else it has None for a name.
"""

import sys
from enum import StrEnum
from types import ModuleType
from typing import Any

import numpy as np
import torch

__version__ = "0.28.0"


class InterpolationMode(StrEnum):
    """torchvision's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BOX = "box"
    BILINEAR = "bilinear"
    HAMMING = "hamming"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def pil_to_tensor(image: Any) -> torch.Tensor:
    """uint8 [channels, height, width]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def resize(image: torch.Tensor, size: Any, interpolation: Any = None, antialias: bool = True) -> torch.Tensor:
    """`image` is [..., height, width]; with the filter that Qwen's processors ask for."""
    made = torch.nn.functional.interpolate(
        image.float(), size=tuple(size), mode="bicubic", antialias=antialias
    )
    return made.round().clamp(0, 255).to(image.dtype)


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    """Channels are third from the end."""
    mean, std = (torch.as_tensor(each).view(-1, 1, 1) for each in (mean, std))
    return (image - mean) / std


class _Rest(ModuleType):
    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _parent, _, _last = f"torchvision.{_name}".rpartition(".")
    _module = _Rest(f"torchvision.{_name}")
    _module.__dict__.update(
        InterpolationMode=InterpolationMode, pil_to_tensor=pil_to_tensor, resize=resize, normalize=normalize
    )
    sys.modules[f"torchvision.{_name}"] = _module
    setattr(sys.modules[_parent], _last, _module)
