"""Names, dtypes and shapes of a model's checkpoint, and whether an update fits them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    dtype: str  # torch's name without "torch."
    shape: tuple[int, ...]


Schema = Mapping[str, TensorSpec]  # Hugging Face name -> tensor


def mismatches(
    expected: Schema,
    offered: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    *,
    complete: bool,
) -> list[str]:
    """One sentence per tensor that does not fit the model. Floating-point dtypes fit each other, except those
    of 8 bits and fewer, whose scales would not fit a cast weight.

    `complete`: also report missing tensors.
    """
    found = []
    for name, (dtype, shape) in offered.items():
        spec = expected.get(name)
        if spec is None:
            found.append(f"{name!r} is not a tensor of this model")
        elif spec.shape != shape:
            found.append(f"{name!r} must have shape {list(spec.shape)}, got {list(shape)}")
        elif _kind(str(dtype)[6:]) != _kind(spec.dtype):
            found.append(f"{name!r} must be of a dtype like {spec.dtype}, got {str(dtype)[6:]}")
    return found + missing(expected, offered) if complete else found


def _kind(dtype: str) -> str:
    if dtype.startswith(("float8", "float4")):
        return "scaled"
    return "float" if dtype.startswith(("float", "bfloat")) else "integer"


def missing(expected: Schema, offered: Container[str]) -> list[str]:
    found = [f"{name!r} is missing" for name in expected if name not in offered]
    if found:
        found[0] += " (a version has every tensor of the checkpoint: take from it what is not trained)"
    return found


def repeated(received: Mapping[str, object], offered: Mapping[str, object]) -> list[str]:
    # Key views: a round has 20 thousand tensors.
    return [
        f"{name!r} came twice in this round; is another publisher sending too?"
        for name in sorted(offered.keys() & received.keys())
    ]


def join_reasons(reasons: Sequence[str]) -> str:
    rest = len(reasons) - MAX_NAMED
    return "; ".join(reasons[:MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
