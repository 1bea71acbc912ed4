"""An adapter's files without tensors: what they hold is a name, their shape a rank."""

import json
import struct
from pathlib import Path

from deployments.weights.store.adapter_store import CONFIG, TENSORS

MAX_RANK = 8


def write_adapter(directory: Path, content: str, *, rank: int = 4, bytes_short: int = 0) -> None:
    """Write both files; `bytes_short`: the second one is not written to its end."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps({"r": rank}))
    tensor = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    header = json.dumps({"__metadata__": {"content": content}, "a": tensor}).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(8)
    (directory / TENSORS).write_bytes(whole[: len(whole) - bytes_short])


def read_content(directory: Path) -> str:
    """What the second file holds. Raises OSError if it cannot be read."""
    read = (directory / TENSORS).read_bytes()
    (length,) = struct.unpack("<Q", read[:8])
    return str(json.loads(read[8 : 8 + length])["__metadata__"]["content"])


def read_rank(directory: Path) -> int:
    return int(json.loads((directory / CONFIG).read_text())["r"])
