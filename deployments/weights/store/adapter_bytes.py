"""The bytes of an adapter's two files: digested, and copied, in parts that several threads share.

The digest is the SHA-256 of each file's size and of the SHA-256 of each of its parts. On one thread it took
longer than anything else that a load does with the bytes.
"""

import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PART_BYTES = 8 << 20
THREADS = 4


class CannotWrite(OSError):
    """The copy cannot be written: nothing is wrong with what was to be copied."""


@contextmanager
def writing() -> Iterator[None]:
    """Raises CannotWrite in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(error.errno, error.strerror, error.filename) from error


def digest_of(files: Mapping[str, bytes | memoryview]) -> str:
    """Of both files of an adapter, from their contents by name: what `adapter_digest` finds once written."""
    contents = [memoryview(files[name]) for name in (CONFIG, TENSORS)]
    with ThreadPoolExecutor(THREADS) as threads:
        return _digest((len(each), threads.map(_sha256, _split(each))) for each in contents)


def adapter_digest(directory: Path) -> str:
    """Of both files of an adapter.

    Raises:
        OSError: one cannot be read.
    """
    return copied([directory / CONFIG, directory / TENSORS], [None, None])


def copied(sources: Sequence[Path], targets: Sequence[Path | None]) -> str:
    """Read the files, write them where there is a target, and return their digest.

    Raises:
        OSError: a file cannot be read.
        CannotWrite: a target cannot be written.
    """
    memory = _memory()
    return _digest(_copied(source, to, memory) for source, to in zip(sources, targets, strict=True))


def _copied(source: Path, target: Path | None, memory: "SimpleQueue[memoryview]") -> tuple[int, list[bytes]]:
    """The size of a file and the digests of its parts."""
    with (
        source.open("rb", buffering=0) as reader,
        _opened(target) as writer,
        ThreadPoolExecutor(THREADS) as threads,  # ends before the files are closed, whatever happens
    ):
        size = os.fstat(reader.fileno()).st_size
        to = None if target is None else writer.fileno()
        return size, list(threads.map(partial(_part, reader.fileno(), to, memory), _bounds(size)))


def _digest(files: Iterable[tuple[int, Iterable[bytes]]]) -> str:
    digest = hashlib.sha256()
    for size, parts in files:
        digest.update(struct.pack("<Q", size))
        for part in parts:
            digest.update(part)
    return digest.hexdigest()


def _bounds(size: int) -> Iterator[tuple[int, int]]:
    """Where each part begins and ends."""
    return ((begin, min(begin + PART_BYTES, size)) for begin in range(0, size, PART_BYTES))


def _split(content: memoryview) -> Iterator[memoryview]:
    return (content[begin:end] for begin, end in _bounds(len(content)))


def _sha256(content: memoryview) -> bytes:
    return hashlib.sha256(content).digest()


def _part(
    reader: int, writer: int | None, memory: "SimpleQueue[memoryview]", bounds: tuple[int, int]
) -> bytes:
    """Of two file descriptors. The digest of what was read, which is less if the file has become shorter."""
    begin, end = bounds
    whole = memory.get()
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
        memory.put(whole)


def _write(writer: int, left: memoryview, at: int) -> None:
    with writing():
        while left:  # the last of a full disk takes a part
            written = os.pwrite(writer, left, at)
            left, at = left[written:], at + written


def _opened(target: Path | None) -> FileIO:
    with writing():  # without a buffer, whose rest would be written, or not, when it is closed
        return open(os.devnull if target is None else target, "wb", buffering=0)


def _memory() -> "SimpleQueue[memoryview]":
    """A part for each thread. Not from malloc, which keeps what each thread has freed: the controller would
    hold it for good."""
    memory: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(THREADS):
        memory.put(memoryview(mmap.mmap(-1, PART_BYTES)))
    return memory
