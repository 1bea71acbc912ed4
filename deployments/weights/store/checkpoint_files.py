"""Which files a Hugging Face checkpoint consists of, and which tensors they say to have. Reads no tensor.

Format: https://github.com/huggingface/safetensors#format.
"""

import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic import JsonValue, NonNegativeInt, TypeAdapter, ValidationError

from deployments.protocol.poll import FilePart

READ_BYTES = 16 << 20  # at a time


def open_file(path: Path) -> FileIO:
    """A regular file, for reading; anything else would wait for a writer.

    Raises:
        ValueError: it is something else.
        OSError: it cannot be opened.
    """
    file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} must be a file")
    return file


def read_into(file: FileIO, begin: int, target: memoryview, go_on: Callable[[], None] = lambda: None) -> None:
    """Fill the target (bytes) with the file's from `begin` on; `go_on`, called between reads, may raise.

    Raises:
        ValueError: the file ends before.
        OSError: it cannot be read.
    """
    done = 0
    while done < len(target):
        go_on()
        count = os.preadv(file.fileno(), [target[done : done + READ_BYTES]], begin + done)
        if count == 0:
            raise ValueError(f"the file ends before byte {begin + len(target)}")
        done += count


MAX_HEADER_BYTES = 100 << 20  # the format's own limit
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf")


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[NonNegativeInt, ...]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


_ENTRIES = TypeAdapter(dict[str, _Entry])


def files_of(directory: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint, as Hugging Face's loaders choose them.

    Raises:
        ValueError: there are none, or not all; says what was expected.
    """
    if (directory / INDEX).is_file():
        return _indexed(directory)
    if (directory / WHOLE).is_file():
        return [directory / WHOLE]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        others = sorted(file.name for pattern in _OTHER_FORMATS for file in directory.glob(pattern))
        there = f"only {others[:3]}" if others else "none"
        raise ValueError(f"{directory} must have *.safetensors files, and has {there}")
    if (directory / "adapter_config.json").is_file():
        raise ValueError(f"{directory} is an adapter; a version needs a whole checkpoint")
    shards = [match for file in found if (match := _SHARD.fullmatch(file.name))]
    for match in shards:
        names = {
            f"{match[1]}-{number:05d}-of-{match[3]}.safetensors" for number in range(1, int(match[3]) + 1)
        }
        _require_files(directory, names, f"{match[0]} says so")
    return found


def _indexed(directory: Path) -> list[Path]:
    try:
        names = set(_weight_map(directory).values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory / INDEX} is not an index that can be read: {error!r:.200}") from error
    strange = sorted(name for name in names if name != Path(name).name)
    if strange:
        raise ValueError(f"{directory / INDEX} must name files beside it, and names {strange[0]!r:.200}")
    _require_files(directory, names, f"{INDEX} names them")
    return [directory / name for name in sorted(names)]


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = json.loads((directory / INDEX).read_bytes())["weight_map"]
    return {str(name): str(file) for name, file in weight_map.items()}


def _require_files(directory: Path, names: set[str], why: str) -> None:
    absent = sorted(name for name in names if not (directory / name).is_file())
    if absent:
        raise ValueError(f"{directory} lacks {len(absent)} files, first {absent[:3]}: {why}")


def parts_of(directory: Path, files: Sequence[Path], part_bytes: int) -> Iterator[FilePart]:
    """The tensors of the files, so many bytes at a time, without digests.

    Raises:
        ValueError: a file is cut off, has no header, or lacks tensors that the index names.
    """
    config = _config(directory)
    seen: dict[str, Path] = {}
    for file in files:
        entries, start = _header(file)
        for name in entries:
            if name in seen:
                raise ValueError(f"{name!r} is in both {seen[name].name} and {file.name}")
            seen[name] = file
        for group in _groups(entries, part_bytes):
            yield FilePart(
                directory=str(directory),
                path=str(file),
                names=tuple(name for name, _ in group),
                dtypes=tuple(entry.dtype for _, entry in group),
                shapes=tuple(entry.shape for _, entry in group),
                ranges=tuple(
                    (start + entry.data_offsets[0], start + entry.data_offsets[1]) for _, entry in group
                ),
                config=config,
            )
            config = None  # once is enough
    if (directory / INDEX).is_file():
        absent = sorted(_weight_map(directory).keys() - seen.keys())
        if absent:
            raise ValueError(
                f"{len(absent)} tensors of {directory / INDEX} are in none of its files: {absent[:3]}"
            )


def _config(directory: Path) -> Mapping[str, JsonValue] | None:
    """Trainers that write weights for an engine to load leave it out."""
    file = directory / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must be an object, and is {type(config).__name__}")
    return config


def _header(file: Path) -> tuple[dict[str, _Entry], int]:
    """The tensors of a file, and where their bytes begin."""
    size_bytes = file.stat().st_size
    with open_file(file) as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size_bytes, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size_bytes}")
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries = _ENTRIES.validate_python(header)
        except (struct.error, ValidationError, ValueError, AttributeError) as error:
            first = str(error).splitlines()[0]
            raise ValueError(f"{file} has no safetensors header that can be read: {first}") from error
    start = 8 + length
    wrong = [name for name, entry in entries.items() if entry.data_offsets[1] < entry.data_offsets[0]]
    if wrong:
        raise ValueError(f"{file} has a tensor that ends before it begins: {wrong[0]!r}")
    end = start + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if end != size_bytes:
        raise ValueError(
            f"{file} must have {end} bytes by its header, and has {size_bytes}: is it being written?"
        )
    return entries, start


def _groups(entries: Mapping[str, _Entry], part_bytes: int) -> Iterator[list[tuple[str, _Entry]]]:
    """Tensors in the order of their bytes, so many at a time; a larger one alone."""
    group: list[tuple[str, _Entry]] = []
    held = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].data_offsets):
        size = entry.data_offsets[1] - entry.data_offsets[0]
        if group and held + size > part_bytes:
            yield group
            group, held = [], 0
        group.append((name, entry))
        held += size
    if group:
        yield group
