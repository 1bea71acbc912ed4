"""Reads one part of a checkpoint on its own thread: a disk that hangs must not block the staging thread,
which drops updates."""

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from safetensors.torch import _TYPES as SAFETENSORS_DTYPES

from deployments.protocol.poll import FilePart
from deployments.weights.store.checkpoint_files import open_file, read_into
from deployments.weights.wire.checkpoint_schema import join_reasons
from deployments.weights.wire.chunk_layout import (
    Chunk,
    ReceivedChunk,
    packed_chunk,
    plan_chunks,
    write_digests,
)
from deployments.weights.wire.digest import signed

_POLL_S = 0.01

# May change without a change of meaning for the weights.
_FREE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map"})
_FREE |= {"max_position_embeddings", "initializer_range", "attn_implementation", "output_router_logits"}


class FileRead:
    def __init__(self, part: FilePart, checkpoint: Path, device: torch.device) -> None:
        self._part = part
        self._checkpoint = checkpoint
        self._device = device
        self._aborted = threading.Event()
        self._error: Exception | None = None

    def chunks(self) -> Iterator[ReceivedChunk]:
        """The part as one chunk, with the digests that its tensors must have. Raises ValueError: not this
        model's files, unreadable, or aborted."""
        check_config(self._part.config, self._checkpoint)
        chunk = chunk_of(self._part)
        try:
            block = torch.empty(chunk.size_bytes, dtype=torch.uint8)
        except RuntimeError as error:  # torch's, where the host has no memory
            raise self._no_memory(chunk, error) from error
        self._read(chunk, block)
        write_digests(chunk, signed([int(each, 16) for each in self._part.digests]), block)
        try:
            received = block.to(self._device)
        except torch.OutOfMemoryError as error:
            raise self._no_memory(chunk, error) from error
        yield packed_chunk(chunk, received)

    def abort(self) -> None:
        """Called on any thread."""
        self._aborted.set()

    def _no_memory(self, chunk: Chunk, error: Exception) -> ValueError:
        return ValueError(f"no memory for {chunk.size_bytes} bytes of {self._part.path}: {error}")

    def _read(self, chunk: Chunk, block: torch.Tensor) -> None:
        reading = threading.Thread(target=self._fill, args=(chunk, block), name="file-read", daemon=True)
        reading.start()
        while reading.is_alive() and not self._aborted.is_set():
            reading.join(_POLL_S)
        if self._aborted.is_set():
            raise ValueError(f"{self._part.path} was not read completely: the update was dropped")
        if self._error is not None:
            raise ValueError(f"{self._part.path} cannot be read: {self._error}") from self._error

    def _fill(self, chunk: Chunk, block: torch.Tensor) -> None:
        target = memoryview(block.numpy())
        try:
            with open_file(Path(self._part.path)) as file:
                for entry, (begin, end) in zip(chunk.entries, self._part.ranges, strict=True):
                    part = target[entry.offset : entry.offset + end - begin]
                    read_into(file, begin, part, self._check_aborted)
        except (OSError, ValueError) as error:
            self._error = error

    def _check_aborted(self) -> None:
        if self._aborted.is_set():
            raise ValueError("aborted")


def chunk_of(part: FilePart) -> Chunk:
    """A new layout object each time: each round has other memory. Raises ValueError."""
    unknown = [dtype for dtype in part.dtypes if dtype not in SAFETENSORS_DTYPES]
    if unknown:
        raise ValueError(f"{part.path}: expected dtypes of {sorted(SAFETENSORS_DTYPES)}, got {unknown[0]!r}")
    dtypes = [SAFETENSORS_DTYPES[dtype] for dtype in part.dtypes]
    (chunk,) = plan_chunks(list(zip(part.names, dtypes, part.shapes, strict=True)), sys.maxsize)
    wrong = [
        f"{entry.name!r} is {list(entry.shape)} of {str(entry.dtype)[6:]} in {end - begin} bytes"
        for entry, (begin, end) in zip(chunk.entries, part.ranges, strict=True)
        if entry.size_bytes != end - begin
    ]
    if wrong:
        raise ValueError(f"{part.path}: {join_reasons(wrong)}")
    return chunk


def check_config(config: Mapping[str, JsonValue] | None, checkpoint: Path) -> None:
    """Raise ValueError unless the fields shared with the engine's config agree."""
    file = checkpoint / "config.json"
    if config is None or not file.is_file():
        return
    wrong = list(_differences(config, json.loads(file.read_bytes())))
    if wrong:
        raise ValueError(f"config.json is of another model: {join_reasons(wrong)}")


def _differences(config: Mapping[str, Any], own: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted(config.keys() & own.keys()):
        theirs, ours = config[name], own[name]
        if name in _FREE or name.endswith(("_token_id", "dropout")):
            continue
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            yield from _differences(theirs, ours, f"{prefix}{name}.")
        elif theirs != ours:
            yield f"{prefix}{name} is {theirs!r:.80}, and the fleet's model has {ours!r:.80}"
