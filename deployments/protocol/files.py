"""Weights that every replica reads by itself, from files that all hosts see at the same path."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Some of the n tensors of a safetensors file: one payload of a round whose weights come from files.

    A replica takes the bytes only if their digests are the ones stated here.
    """

    directory: str  # of the checkpoint; absolute, without symbolic links
    path: str  # of the file, which may be elsewhere; absolute, without symbolic links
    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # as safetensors names them
    shapes: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int], ...]  # first byte of each in the file, and the one after its last
    digests: tuple[str, ...] = ()  # 16 hexadecimal digits each; empty until they are read
    config: Mapping[str, JsonValue] | None = None  # config.json of the checkpoint, where it has one

    @property
    def size_bytes(self) -> int:
        """Of the tensors."""
        return sum(end - begin for begin, end in self.ranges)
