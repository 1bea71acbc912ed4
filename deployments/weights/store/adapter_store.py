"""The fleet's own copies of adapters: later changes of a user's directory change nothing.

    adapters/a00000041/   adapter_config.json, adapter_model.safetensors

Engines read the files again: after an eviction, or when a replica starts later. The controller copies and
removes; replicas read, and compare the digest.

The digest is the SHA-256 of each file's size and each part's SHA-256, computed by several threads: one thread
took longer than the rest of a load.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from deployments.host.durable_files import sync
from deployments.protocol.adapters import AdapterFiles
from deployments.weights.store.checkpoint_files import is_below, read_header

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PART_BYTES = 1 << 20  # malloc would keep larger ones for each of the controller's threads
COPY_BYTES = 1 << 30  # bytes of one call
THREADS = 4
MAX_CONFIG_BYTES = 1 << 20
LAG_S = 10.0  # a shared file system may show files this late
_RETRY_S = 0.1
_NAME = re.compile(r"a(\d{8,})|\.a(\d{8,})\.partial")
_PICKLED = ("adapter_model.bin", "adapter_model.pt")
T = TypeVar("T")


class Incomplete(ValueError):
    """The files are incomplete: being written, or a file system lags."""


async def until_complete(
    attempt: Callable[[], Awaitable[T]], lag_s: float, clock: Callable[[], float] = time.monotonic
) -> T:
    """Raises Incomplete after `lag_s`."""
    deadline = clock() + lag_s
    while True:
        try:
            return await attempt()
        except (Incomplete, FileNotFoundError) as error:
            if clock() >= deadline:
                raise Incomplete(f"{error} (waited {lag_s:g} s)") from error
        await asyncio.sleep(_RETRY_S)


class CannotWrite(OSError):
    """The copy cannot be written; the source is fine."""


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWrite(error.errno, error.strerror, error.filename) from error


class AdapterStore:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def copy(self, source: Path, roots: Sequence[Path], adapter_id: int, digest: str = "") -> AdapterFiles:
        """Copy an adapter's two files. Readers find them from now on; they are durable after `complete`.

        Args:
            roots: directories, one of which must contain the files.
            digest: stated by a writer that never changes the files again: they are hard-linked if possible,
                and neither read nor written. Empty: unknown.

        Raises:
            Incomplete: a file is absent, is shorter than its header says, or changes while it is read.
            ValueError: outside of the roots, or not the files of an adapter.
            CannotWrite: the copy cannot be written.
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
        with _writing():
            partial.mkdir(parents=True)
        try:
            copies = [partial / CONFIG, partial / TENSORS]
            if not digest or not _linked(files, copies):
                digest = _copied(files, copies)
            if [_stamp(file) for file in files] != before:
                raise Incomplete(f"{source} changed while it was read")
            _check_length(partial / TENSORS)
            shutil.rmtree(final, ignore_errors=True)
            with _writing():
                partial.rename(final)
        except BaseException:  # an incomplete copy must not stay
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return AdapterFiles(path=str(final), digest=digest, size_bytes=before[1][1])

    def complete(self, adapter_id: int) -> None:
        """Raises CannotWrite; the copy stays: replicas may be reading it."""
        final = self.directory / f"a{adapter_id:08d}"
        with _writing():
            for path in (final / CONFIG, final / TENSORS, final, self.directory):
                sync(path)

    def ids(self) -> list[int]:
        """Also of copies that a crashed process did not complete."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted({int(name[1] or name[2]) for name in names if name is not None})

    def remove(self, adapter_id: int) -> None:
        name = f"a{adapter_id:08d}"
        for each in (self.directory / name, self.directory / f".{name}.partial"):
            with suppress(FileNotFoundError):
                shutil.rmtree(each)


def _linked(files: Sequence[Path], links: Sequence[Path]) -> bool:
    try:
        for file, link in zip(files, links, strict=True):
            os.link(file, link)
    except OSError:  # another file system, or one without hard links
        for link in links:
            link.unlink(missing_ok=True)
        return False
    return True


def _copied(files: Sequence[Path], copies: Sequence[Path]) -> str:
    with ThreadPoolExecutor(1) as beside:
        digesting = beside.submit(_files_digest, files)
        for file, copy in zip(files, copies, strict=True):
            with file.open("rb") as reader, _writing(), copy.open("wb") as writer:
                while os.sendfile(writer.fileno(), reader.fileno(), None, COPY_BYTES):
                    pass
        return digesting.result()


def _confined(file: Path, roots: Sequence[Path]) -> Path:
    resolved = file.resolve()
    if not is_below(resolved, roots):
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
    try:
        header = read_header(file)
    except ValueError as error:
        raise Incomplete(str(error)) from None
    if not header.entries:
        raise ValueError(f"{file} has no tensors")
    actual = file.stat().st_size
    if actual < header.file_bytes:
        raise Incomplete(f"{file} has {actual} of {header.file_bytes} bytes")
    if actual > header.file_bytes:
        raise ValueError(f"{file} has {actual} bytes, its header says {header.file_bytes}")


def digest_of(files: Mapping[str, bytes | memoryview]) -> str:
    contents = [memoryview(files[name]) for name in (CONFIG, TENSORS)]
    return _digest((len(each), partial(_slice, each)) for each in contents)


def adapter_digest(directory: Path) -> str:
    return _files_digest([directory / CONFIG, directory / TENSORS])


def _files_digest(files: Sequence[Path]) -> str:
    with files[0].open("rb") as config, files[1].open("rb") as tensors:
        descriptors = [each.fileno() for each in (config, tensors)]
        return _digest((os.fstat(each).st_size, partial(os.pread, each)) for each in descriptors)


def _slice(content: memoryview, length: int, begin: int) -> memoryview:
    return content[begin : begin + length]


def _digest(contents: Iterable[tuple[int, Callable[[int, int], bytes | memoryview]]]) -> str:
    """Each content is its size in bytes and a reader of (position, size)."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(THREADS) as threads:
        for size, read in contents:
            digest.update(struct.pack("<Q", size))
            parts = (partial(read, PART_BYTES, begin) for begin in range(0, size, PART_BYTES))
            for each in threads.map(lambda part: hashlib.sha256(part()).digest(), parts):
                digest.update(each)
    return digest.hexdigest()
