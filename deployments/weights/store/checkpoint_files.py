"""Hugging Face checkpoint directories, read without torch in a router.

    files_of, parts_of   the files of a checkpoint, and whether each is complete, by the headers alone
    stated               the digests of a part's tensors; each replica must read the same
    Checkpoint           a user's directory below a configured root, as the parts of a round
    check_files          a stored version against its manifest

Blocks on the disk. Format: https://github.com/huggingface/safetensors#format.
"""

import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import JsonValue, NonNegativeInt, TypeAdapter

from deployments.protocol.errors import printable
from deployments.protocol.poll import FilePart
from deployments.weights.store.versions import (
    DRAFTER,
    DRAFTER_DIRECTORY,
    MANIFEST,
    DirectoryLock,
    VersionManifest,
)
from deployments.weights.wire.checkpoint_schema import join_reasons
from deployments.weights.wire.digest_definition import digest_bytes

PART_BYTES = 256 << 20  # staged at a time, within one deadline
READ_BYTES = 16 << 20  # bytes of one call
MAX_HEADER_BYTES = 100 << 20  # the format's own limit
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
MISTRAL = "consolidated"  # prefix of files with Mistral's own names, of the same weights

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf")
Identity = tuple[int, int, int, int]  # device, inode, size, time of the last change in ns


def open_file(path: Path) -> FileIO:
    """For reading. Raises ValueError unless it is a regular file: opening a FIFO would block."""
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} must be a file")
    return file


def read_into(file: FileIO, begin: int, target: memoryview, check: Callable[[], None] = lambda: None) -> None:
    """Fill the target (bytes) from byte `begin` on. `check`, called between reads, may raise. Raises
    ValueError if the file is shorter."""
    done = 0
    while done < len(target):
        check()
        count = os.preadv(file.fileno(), [target[done : done + READ_BYTES]], begin + done)
        if count == 0:
            raise ValueError(f"{file.name}: the file ends before byte {begin + len(target)}")
        done += count


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[NonNegativeInt, ...]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


_ENTRIES = TypeAdapter(dict[str, TensorEntry])


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    entries: Mapping[str, TensorEntry]
    start: int  # where the tensors' bytes begin

    @property
    def file_bytes(self) -> int:
        return self.start + max((entry.data_offsets[1] for entry in self.entries.values()), default=0)


def read_header(file: Path) -> FileHeader:
    """Raises ValueError if the file has no safetensors header."""
    size_bytes = file.stat().st_size
    with open_file(file) as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size_bytes, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size_bytes}")
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries = _ENTRIES.validate_python(header)
        except (struct.error, ValueError, AttributeError, TypeError, RecursionError) as error:
            first = str(error).splitlines()[0]
            raise ValueError(f"{file} has no safetensors header that can be read: {first}") from error
    wrong = [name for name, entry in entries.items() if entry.data_offsets[1] < entry.data_offsets[0]]
    if wrong:
        raise ValueError(f"{file} has a tensor that ends before it begins: {wrong[0]!r}")
    return FileHeader(entries=entries, start=8 + length)


def indexed_files(directory: Path) -> set[str] | None:
    """None without an index."""
    try:
        return set(_weight_map(directory).values())
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{directory / INDEX} is not an index that can be read: {error!r:.200}") from error


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = json.loads((directory / INDEX).read_bytes())["weight_map"]
    return {str(name): str(file) for name, file in weight_map.items()}


def files_of(directory: Path) -> list[Path]:
    """As Hugging Face's loaders choose them. Raises ValueError."""
    indexed = indexed_files(directory)
    if indexed is not None:
        strange = sorted(name for name in indexed if name != Path(name).name)
        if strange:
            raise ValueError(f"{directory / INDEX} must name files beside it, and names {strange[0]!r:.200}")
        _require_files(directory, indexed, f"{INDEX} names them")
        return [directory / name for name in sorted(indexed)]
    if (directory / WHOLE).is_file():
        return [directory / WHOLE]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        others = sorted(file.name for pattern in OTHER_FORMATS for file in directory.glob(pattern))
        there = f"only {others[:3]}" if others else "none"
        raise ValueError(f"{directory} must have *.safetensors files, and has {there}")
    if (directory / "adapter_config.json").is_file():
        raise ValueError(f"{directory} is an adapter; a version needs a whole checkpoint")
    for match in filter(None, (_SHARD.fullmatch(file.name) for file in found)):
        numbers = range(1, int(match[3]) + 1)
        names = {f"{match[1]}-{number:05d}-of-{match[3]}.safetensors" for number in numbers}
        _require_files(directory, names, f"{match[0]} says so")
    return found


def _require_one_reading(directory: Path) -> None:
    """Raises ValueError if transformers and vLLM would load different files: some may be old."""
    if not (directory / WHOLE).is_file():
        return
    found = {file.name for file in directory.glob("*.safetensors") if not file.name.startswith(MISTRAL)}
    of_vllm = indexed_files(directory) or found
    if of_vllm != {WHOLE}:
        named = INDEX if (directory / INDEX).is_file() else "no index"
        raise ValueError(
            f"{directory} has {WHOLE}, which transformers loads alone, and {named}: vLLM loads "
            f"{sorted(of_vllm)[:3]}; remove the files that are not this version's"
        )


def _require_files(directory: Path, names: set[str], why: str) -> None:
    absent = sorted(name for name in names if not (directory / name).is_file())
    if absent:
        raise ValueError(f"{directory} lacks {len(absent)} files, first {absent[:3]}: {why}")


def parts_of(directory: Path, files: Sequence[Path], part_bytes: int, prefix: str = "") -> Iterator[FilePart]:
    """The tensors of the files, without digests, at most `part_bytes` at a time or one larger tensor.
    `prefix`: of a drafter's names in a version. Raises ValueError if a file is incomplete, or lacks tensors
    that the index names."""
    config = None if prefix else _config(directory)
    seen: dict[str, Path] = {}
    for file in files:
        header = read_header(file)
        if header.file_bytes != (size_bytes := file.stat().st_size):
            raise ValueError(
                f"{file} must have {header.file_bytes} bytes by its header, and has {size_bytes}: "
                "is it being written?"
            )
        for name in header.entries:
            if name in seen:
                raise ValueError(f"{name!r} is in both {seen[name].name} and {file.name}")
            seen[name] = file
        for group in _groups(header.entries, part_bytes):
            ranges = (entry.data_offsets for _, entry in group)
            yield FilePart(
                directory=str(directory),
                path=str(file),
                names=tuple(prefix + name for name, _ in group),
                dtypes=tuple(entry.dtype for _, entry in group),
                shapes=tuple(entry.shape for _, entry in group),
                ranges=tuple((header.start + begin, header.start + end) for begin, end in ranges),
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
    """None for weights that a trainer wrote for an engine to load."""
    file = directory / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must be an object, and is {type(config).__name__}")
    return config


def _groups(entries: Mapping[str, TensorEntry], part_bytes: int) -> Iterator[list[tuple[str, TensorEntry]]]:
    group: list[tuple[str, TensorEntry]] = []
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


def _digests(part: FilePart) -> tuple[str, ...]:
    buffer = np.empty(max((end - begin for begin, end in part.ranges), default=0), dtype=np.uint8)
    digests = []
    with open_file(Path(part.path)) as file:
        for begin, end in part.ranges:
            data = buffer[: end - begin]
            read_into(file, begin, data.data)
            digests.append(f"{digest_bytes(data):016x}")
    return tuple(digests)


def check_files(
    directory: Path, version: int, fleet_id: str | None = None, expected_digest: str | None = None
) -> None:
    """Compare every tensor of a stored version with its manifest. `fleet_id`: its owner; None: any.
    `expected_digest`: the committed one; None: unknown. Raises ValueError (another version or other tensors;
    names the first few) or OSError (absent or unreadable)."""
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(f"version {version} must be in {directory}, and there is none")
    manifest = VersionManifest.decode((directory / MANIFEST).read_bytes())
    if manifest.version != version:
        raise ValueError(f"{directory} must hold version {version}, and its manifest says {manifest.version}")
    if fleet_id is not None and manifest.fleet_id != fleet_id:
        raise ValueError(
            f"{directory} must hold version {version} of fleet {fleet_id}, and its manifest names "
            f"{manifest.owner}"
        )
    if expected_digest is not None and manifest.digest != expected_digest:
        raise ValueError(
            f"{directory} must hold version {version} as it was committed, with digest {expected_digest}, "
            f"and its manifest states {manifest.digest}"
        )
    # vLLM loads all of them.
    parts = list(parts_of(directory, sorted(directory.glob("*.safetensors")), PART_BYTES))
    drafter = directory / DRAFTER_DIRECTORY
    parts += parts_of(drafter, sorted(drafter.glob("*.safetensors")), PART_BYTES, DRAFTER)
    problems = _unnamed(parts, manifest)
    for part in parts:
        problems += _rewritten(part, _digests(part), manifest)
    _refuse_damaged(directory, manifest, problems)


def _unnamed(parts: Sequence[FilePart], written: VersionManifest) -> list[str]:
    found = {name for part in parts for name in part.names}
    return [
        f"{name!r} {'is not in its manifest' if name in found else 'was written and is gone'}"
        for name in sorted(found ^ written.tensors.keys())
    ]


def _rewritten(part: FilePart, digests: Sequence[str], written: VersionManifest) -> list[str]:
    return [
        f"{name!r} was written with digest {written.tensors[name].digest} and has {found}"
        for name, found in zip(part.names, digests, strict=True)
        if name in written.tensors and written.tensors[name].digest != found
    ]


def _refuse_damaged(
    directory: Path | str, written: VersionManifest, problems: Sequence[str], advice: str = ""
) -> None:
    if problems:
        raise ValueError(
            f"version {written.version} in {directory} is damaged: {join_reasons(problems)}{advice}"
        )


def confined(path: str, roots: Sequence[Path]) -> Path:
    """The path without symbolic links, if it is a configured root or below one. Raises ValueError, without
    revealing whether the path exists."""
    allowed = f"{[str(root) for root in roots]} (the store, and 'security.checkpoint_roots')"
    if "\0" in path or not os.path.isabs(path):
        raise ValueError(f"path: expected an absolute path below one of {allowed}, got {path!r:.200}")
    try:
        resolved = Path(path).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long
        raise ValueError(f"path: {path!r:.200} cannot be resolved: {error}") from error
    if not is_below(resolved, roots):
        raise ValueError(f"path: expected a directory below one of {allowed}, got {path!r:.200}")
    return resolved


def is_below(resolved: Path, roots: Sequence[Path]) -> bool:
    return any(resolved.is_relative_to(root.resolve()) for root in roots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A directory with valid headers. It is locked against removal from the store until `close`."""

    directory: Path
    parts: Sequence[FilePart]  # without digests
    identities: Mapping[Path, Identity]  # when their headers were read
    lock: DirectoryLock
    written: VersionManifest | None = None

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @classmethod
    def open(cls, path: str, roots: Sequence[Path], part_bytes: int = PART_BYTES) -> Self:
        """Raises ValueError: outside the roots, incomplete, or not as its manifest says."""
        directory = confined(path, roots)
        if not directory.exists():
            raise ValueError(f"{directory} does not exist on the router's host")
        if not directory.is_dir():
            raise ValueError(f"{directory} must be a checkpoint directory, and is a file")
        lock = DirectoryLock(directory)
        try:
            _require_one_reading(directory)
            files = [_confined_file(file, roots) for file in files_of(directory)]
            drafter = directory / DRAFTER_DIRECTORY
            of_drafter = (
                [_confined_file(file, roots) for file in files_of(drafter)] if drafter.is_dir() else []
            )
            for each in map(str, (directory, *files, *of_drafter)):
                if printable(each) != each:
                    raise ValueError(f"{each}: expected a path in UTF-8, in which replicas are told it")
            identities = {file: identity_of(file) for file in (*files, *of_drafter)}
            parts = list(parts_of(directory, files, part_bytes))
            parts += parts_of(drafter, of_drafter, part_bytes, DRAFTER)
            if not parts:
                raise ValueError(f"{directory} has no tensors")
            written = _manifest_in(directory, roots)
            if written is not None:
                _refuse_damaged(directory, written, _unnamed(parts, written), _ADVICE)
        except BaseException:  # the caller has no lock to release
            lock.close()
            raise
        return cls(directory=directory, parts=parts, identities=identities, lock=lock, written=written)

    def changed(self) -> str | None:
        """None: no file has changed since `open`."""
        for file, identity in self.identities.items():
            with suppress(OSError):
                if identity_of(file) == identity:
                    continue
            return f"{file} was changed while it was read"
        return None

    def close(self) -> None:
        self.lock.close()


def stated(part: FilePart, written: VersionManifest | None = None) -> FilePart:
    """The part with its tensors' digests. Raises ValueError if the manifest has others."""
    digests = _digests(part)
    if written is not None:
        _refuse_damaged(part.directory, written, _rewritten(part, digests, written), _ADVICE)
    return replace(part, digests=digests)


_ADVICE = (
    "; publish another version. If its files were changed on purpose, publish a copy without " + MANIFEST
)


def _manifest_in(directory: Path, roots: Sequence[Path]) -> VersionManifest | None:
    file = directory / MANIFEST
    with suppress(FileNotFoundError, ValueError), open_file(_confined_file(file, roots)) as content:
        return VersionManifest.decode(content.readall())
    return None


def _confined_file(file: Path, roots: Sequence[Path]) -> Path:
    resolved = file.resolve()  # the hub's cache has links to its blobs
    if not is_below(resolved, roots):
        raise ValueError(f"{file} is a link to a file outside of {[str(root) for root in roots]}")
    if not stat.S_ISREG(resolved.stat().st_mode):
        raise ValueError(f"{file} must be a file")
    return resolved


def identity_of(file: Path) -> Identity:
    """Changes when the file is written or replaced. Raises OSError."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
