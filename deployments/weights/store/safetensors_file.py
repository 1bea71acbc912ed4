"""Reads tensors of a checkpoint, and writes a safetensors file tensor by tensor: without a second copy of the
weights, and with the interpreter lock released while the bytes are written (an engine decodes, or a trainer
steps, in the same process).

Format: https://github.com/huggingface/safetensors#format. The length of the header (8 bytes, little
endian), the header (JSON), then the tensors' bytes.
"""

import json
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES

ALIGNMENT = 8
NAMES = {dtype: name for name, dtype in _TYPES.items()}
WRITE_BYTES = 4 << 20  # some milliseconds


def write_safetensors(
    tensors: Mapping[str, torch.Tensor], path: Path, rest: Callable[[], None] = lambda: None
) -> None:
    """Write tensors of any shape to one file.

    Args:
        tensors: by name, on the CPU. One that is not contiguous is copied while it is written.
        rest: called after every few MiB.

    Raises:
        ValueError: a dtype that the format has no name for.
        OSError: the file cannot be written.
    """
    # The widest dtypes first: then every tensor begins at a multiple of its own item size.
    ordered = sorted(tensors.items(), key=lambda pair: -pair[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name!r} has dtype {tensor.dtype}, which safetensors cannot hold")
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(data), WRITE_BYTES):
                file.write(data[start : start + WRITE_BYTES])
                rest()


def read_tensors(directory: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint directory, by name; memory-mapped, so that they take no memory of their own and
    outlive the files.

    Raises:
        ValueError: a tensor is not there; names the first few.
        OSError: a file cannot be read.
    """
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")) if names else ():
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.offset_keys() if name in names}
    absent = sorted(set(names) - found.keys())
    if absent:
        raise ValueError(f"{directory} must hold {len(absent)} more tensors, first {absent[:5]}")
    return found
