"""The fleet's own copies of adapters, so that later changes of a user's directory change nothing.

    adapters/a00000041/   adapter_config.json, adapter_model.safetensors

An engine that has too little memory for an adapter drops it, and reads the files again with the next request
that names it; a replica that starts later reads them as well. So the files must stay as they were loaded. The
controller copies and removes; replicas read, and compare the digest.

The digest is the SHA-256 of each file's size and of the SHA-256 of each of its parts, which several threads
compute: on one thread it took longer than everything else that a load does with the bytes.
"""

import asyncio
import hashlib
import json
import mmap
import os
import re
import shutil
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from deployments.host.durable_files import sync
from deployments.protocol.adapters import AdapterFiles
from deployments.weights.store.checkpoint_files import is_below, read_header

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PART_BYTES = 8 << 20
THREADS = 4
MAX_CONFIG_BYTES = 1 << 20
LAG_S = 10.0  # a shared file system may show files this much later than their writer
_RETRY_S = 0.1
_NAME = re.compile(r"a(\d{8,})|\.a(\d{8,})\.partial")
_PICKLED = ("adapter_model.bin", "adapter_model.pt")
_Buffers = SimpleQueue[memoryview]
T = TypeVar("T")


class Incomplete(ValueError):
    """The files are not complete, perhaps because they are being written or a file system lags."""


async def until_complete(
    attempt: Callable[[], Awaitable[T]], lag_s: float, clock: Callable[[], float] = time.monotonic
) -> T:
    """Repeat an attempt while the files are incomplete. Raises Incomplete after `lag_s`."""
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
    """Raises CannotWrite in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(error.errno, error.strerror, error.filename) from error


class AdapterStore:
    """The directory of the copies."""

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
                digest = copied(files, copies)
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
        """Make a copy durable. Raises CannotWrite; the copy stays, because replicas may be reading it."""
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
    """Hard-link all files, or none."""
    try:
        for file, link in zip(files, links, strict=True):
            os.link(file, link)
    except OSError:  # another file system, or one without hard links
        for link in links:
            link.unlink(missing_ok=True)
        return False
    return True


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
    """Raises Incomplete if it is shorter than its header says or has none, ValueError if longer or empty."""
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


# -- digests ---------------------------------------------------------------------------------------


def digest_of(files: Mapping[str, bytes | memoryview]) -> str:
    """The digest of an adapter's two files, from their contents by name."""
    contents = [memoryview(files[name]) for name in (CONFIG, TENSORS)]
    with ThreadPoolExecutor(THREADS) as threads:
        return _digest((len(each), threads.map(_sha256, _split(each))) for each in contents)


def adapter_digest(directory: Path) -> str:
    """The digest of an adapter's two files. Raises OSError."""
    return copied([directory / CONFIG, directory / TENSORS], [None, None])


def copied(sources: Sequence[Path], targets: Sequence[Path | None]) -> str:
    """Read the files, write them where there is a target, and return their digest. Raises OSError,
    CannotWrite."""
    # A part for each thread. Not from malloc, which would keep what each of the controller's threads freed.
    buffers: _Buffers = SimpleQueue()
    for _ in range(THREADS):
        buffers.put(memoryview(mmap.mmap(-1, PART_BYTES)))
    return _digest(_copied(source, to, buffers) for source, to in zip(sources, targets, strict=True))


def _copied(source: Path, target: Path | None, buffers: _Buffers) -> tuple[int, list[bytes]]:
    with (
        source.open("rb", buffering=0) as reader,
        _opened(target) as writer,
        ThreadPoolExecutor(THREADS) as threads,  # joined before the files are closed
    ):
        size = os.fstat(reader.fileno()).st_size
        to = None if target is None else writer.fileno()
        return size, list(threads.map(partial(_part, reader.fileno(), to, buffers), _bounds(size)))


def _digest(files: Iterable[tuple[int, Iterable[bytes]]]) -> str:
    digest = hashlib.sha256()
    for size, parts in files:
        digest.update(struct.pack("<Q", size))
        for part in parts:
            digest.update(part)
    return digest.hexdigest()


def _bounds(size: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + PART_BYTES, size)) for begin in range(0, size, PART_BYTES))


def _split(content: memoryview) -> Iterator[memoryview]:
    return (content[begin:end] for begin, end in _bounds(len(content)))


def _sha256(content: memoryview) -> bytes:
    return hashlib.sha256(content).digest()


def _part(reader: int, writer: int | None, buffers: _Buffers, bounds: tuple[int, int]) -> bytes:
    """Copy a part between two file descriptors. The digest of what was read: less, if the file was cut."""
    begin, end = bounds
    whole = buffers.get()
    try:
        filled = 0
        while filled < end - begin:
            got = os.preadv(reader, [whole[filled : end - begin]], begin + filled)
            if got == 0:
                break
            filled += got
        if writer is not None:
            _write(writer, whole[:filled], begin)
        return _sha256(whole[:filled])
    finally:
        buffers.put(whole)


def _write(writer: int, left: memoryview, at: int) -> None:
    with _writing():
        while left:  # a disk that is almost full takes a part
            written = os.pwrite(writer, left, at)
            left, at = left[written:], at + written


def _opened(target: Path | None) -> FileIO:
    with _writing():  # without a buffer, whose rest might be lost when it is closed
        return open(os.devnull if target is None else target, "wb", buffering=0)
