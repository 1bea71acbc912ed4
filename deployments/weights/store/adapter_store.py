"""The fleet's own copies of adapters: what a user's directory becomes later changes nothing.

    adapters/a00000041/   adapter_config.json, adapter_model.safetensors

An engine that has too little room for an adapter forgets it, and reads the files again with the next request
that names it; a replica that starts later reads them as well. So the files must stay as they were loaded. The
controller copies and removes; replicas read, and compare the digest.
"""

import json
import os
import re
import shutil
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deployments.host.durable_files import sync
from deployments.protocol.adapters import AdapterFiles
from deployments.weights.store.adapter_bytes import CONFIG, TENSORS, copied, writing

MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
MAX_CONFIG_BYTES = 1 << 20
_NAME = re.compile(r"a(\d{8,})|\.a(\d{8,})\.partial")


class Incomplete(ValueError):
    """The files are not all there, or are being written: they may be, a little later."""


class AdapterStore:
    """The directory of the copies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def copy(self, source: Path, roots: Sequence[Path], adapter_id: int, digest: str = "") -> AdapterFiles:
        """Copy an adapter's two files. Readers find them from now on; they are durable after `complete`.

        Args:
            roots: directories, one of which must contain the files.
            digest: of the files, whose writer states it and never changes them again: they get a second name
                here where the file system has such, and are neither read nor written. Empty: nobody says so.

        Raises:
            Incomplete: a file is not there, is shorter than it says, or changes while it is read.
            ValueError: outside of the roots, or not the files of an adapter.
            CannotWrite: the copy cannot be written.
            OSError: they cannot be read.
        """
        files = [_confined(source / name, roots) for name in (CONFIG, TENSORS)]
        if not files[1].is_file() and any((source / other).exists() for other in _PICKLED):
            raise ValueError(f"{source} has pickled tensors: expected {TENSORS}, save it as safetensors")
        before = [_stamp(file) for file in files]
        _check_config(files[0])
        _check_length(files[1])
        final = self.directory / f"a{adapter_id:08d}"
        partial = self.directory / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        with writing():
            partial.mkdir(parents=True)
        try:
            copies = [partial / CONFIG, partial / TENSORS]
            if not digest or not _linked(files, copies):
                digest = copied(files, copies)
            if [_stamp(file) for file in files] != before:
                raise Incomplete(f"{source} changed while it was read")
            _check_length(partial / TENSORS)
            shutil.rmtree(final, ignore_errors=True)
            with writing():
                partial.rename(final)
        except BaseException:  # also the caller's: what is not complete must not stay
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return AdapterFiles(path=str(final), digest=digest, size_bytes=before[1][1])

    def complete(self, adapter_id: int) -> None:
        """Make a copy durable. Raises CannotWrite; it is there still, because replicas may be reading it."""
        final = self.directory / f"a{adapter_id:08d}"
        with writing():
            for path in (final / CONFIG, final / TENSORS, final, self.directory):
                sync(path)

    def ids(self) -> list[int]:
        """The ids of the copies, and of those that a process which ended did not complete."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted({int(name[1] or name[2]) for name in names if name is not None})

    def remove(self, adapter_id: int) -> None:
        """Remove what there is of it. Raises OSError if it cannot be removed."""
        name = f"a{adapter_id:08d}"
        for each in (self.directory / name, self.directory / f".{name}.partial"):
            with suppress(FileNotFoundError):
                shutil.rmtree(each)


_PICKLED = ("adapter_model.bin", "adapter_model.pt")


def _linked(files: Sequence[Path], links: Sequence[Path]) -> bool:
    """Whether each file has a second name now; else none has, and copying says what is wrong."""
    try:
        for file, link in zip(files, links, strict=True):
            os.link(file, link)
    except OSError:  # another file system, or one without hard links
        for link in links:
            link.unlink(missing_ok=True)
        return False
    return True


def _confined(file: Path, roots: Sequence[Path]) -> Path:
    """The file itself. Raises ValueError if it is not below one of the roots, links followed."""
    resolved = file.resolve()
    if not any(resolved.is_relative_to(root.resolve()) for root in roots):
        allowed = ", ".join(map(str, roots)) or "none is configured"
        raise ValueError(
            f"lora_path: expected a directory below one of 'security.checkpoint_roots' ({allowed}), "
            f"got {str(file.parent)[:200]!r}"
        )
    return resolved


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except FileNotFoundError:
        raise Incomplete(f"{file} does not exist") from None
    return found.st_mtime_ns, found.st_size


def _check_config(file: Path) -> None:
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{file} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        config: Any = json.loads(file.read_bytes())
    except ValueError as error:
        raise Incomplete(f"{file} is no JSON: {error}") from None
    if not isinstance(config, dict) or type(config.get("r")) is not int:
        raise ValueError(f"{file} must be the configuration of a LoRA adapter: an object with the rank 'r'")
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{file}: peft_type must be 'LORA', got {str(config['peft_type'])[:40]!r}")


def _check_length(file: Path) -> None:
    """Compare a safetensors file's length with what its header says.

    Raises:
        Incomplete: it is shorter, or its header cannot be read.
        ValueError: it is longer.
    """
    actual = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            if header_bytes > min(actual, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes} bytes")
            header = json.loads(stream.read(header_bytes))
            ends = [int(each["data_offsets"][1]) for name, each in header.items() if name != "__metadata__"]
    except (ValueError, struct.error, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Incomplete(f"{file} has no whole safetensors header: {error}") from None
    if not ends:
        raise ValueError(f"{file} has no tensors")
    expected = 8 + header_bytes + max(ends)
    if actual < expected:
        raise Incomplete(f"{file} has {actual} of {expected} bytes")
    if actual > expected:
        raise ValueError(f"{file} has {actual} bytes, its header says {expected}")
