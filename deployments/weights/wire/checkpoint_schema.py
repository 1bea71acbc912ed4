"""What a version consists of, and whether an update fits the model that the fleet serves."""

import json
import struct
from collections.abc import Container, Mapping
from pathlib import Path

import torch
from safetensors.torch import _TYPES as SAFETENSORS_DTYPES

from deployments.protocol import Manifest, TensorSpec

MAX_NAMED = 5  # a message names this many tensors, and counts the rest


def checkpoint_manifest(directory: Path) -> Manifest | None:
    """Names, dtypes and shapes of a Hugging Face checkpoint directory, read from the file headers.

    None if the directory holds no safetensors file (a hub id, or `load_format: dummy` with a
    bare config): then vLLM's own loader is the only judge of names.
    """
    tensors: dict[str, TensorSpec] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                dtype = str(SAFETENSORS_DTYPES[entry["dtype"]]).removeprefix("torch.")
                tensors[name] = TensorSpec(dtype=dtype, shape=tuple(entry["shape"]))
    return Manifest(tensors=tensors) if tensors else None


def mismatches(
    expected: Mapping[str, TensorSpec],
    offered: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    *,
    complete: bool,
) -> list[str]:
    """Why `offered` does not fit the model, a sentence a tensor; empty if it fits.

    A floating-point tensor may come in any floating-point dtype: the model's loader casts it.

    Args:
        complete: also demand that nothing is missing (at the end of a round).
    """
    found = []
    for name, (dtype, shape) in offered.items():
        spec = expected.get(name)
        if spec is None:
            found.append(f"{name!r} is not a tensor of this model")
        elif spec.shape != shape:
            found.append(f"{name!r} must have shape {list(spec.shape)}, got {list(shape)}")
        elif dtype.is_floating_point != getattr(torch, spec.dtype).is_floating_point:
            found.append(f"{name!r} must be of a dtype like {spec.dtype}, got {str(dtype)[6:]}")
    return found + missing(expected, offered) if complete else found


def missing(expected: Mapping[str, TensorSpec], offered: Container[str]) -> list[str]:
    """A sentence for each tensor of the model that did not come."""
    return [f"{name!r} is missing" for name in expected if name not in offered]


def sentence(problems: list[str]) -> str:
    """All mismatches in one line: the first few by name, the rest as a count."""
    rest = len(problems) - MAX_NAMED
    return "; ".join(problems[:MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
