"""Files and directories that are complete once they have their name, even after a host crash; file locks."""

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FLUSH_EVERY_S = 0.02


@contextmanager
def replacing(final: Path, partial: Path | None = None) -> Iterator[Path]:
    """Yields a path to write to, and renames it durably at the end. After an error the old file stays.

    Args:
        partial: the path, for several writers at once.
    """
    aside = final.with_name(f".{final.name}.partial") if partial is None else partial
    try:
        yield aside
        for parent, _, files in os.walk(aside, topdown=False):
            for name in [*files, "."]:
                sync(Path(parent, name))
        if aside.is_file():
            sync(aside)
        rename(aside, final)
    except BaseException:  # any error leaves incomplete content
        with suppress(OSError):
            aside.unlink()  # it may have filled the disk
        shutil.rmtree(aside, ignore_errors=True)
        raise


def rename(path: Path, final: Path) -> None:
    path.replace(final)
    sync(final.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locked(descriptor: int, *, shared: bool = False) -> bool | None:
    """Lock a file until its descriptor is closed. False: another process has it. None: a file system without
    locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def flushing(directory: Path) -> Iterator[None]:
    """Flushes what the block writes below the directory as it is written. The fsync of a large file delays
    every other one on its disk, so the journal's and with it a round (benchmarks/RESULTS.md)."""
    written = threading.Event()

    def flush() -> None:
        sizes: dict[Path, int] = {}
        while not written.wait(_FLUSH_EVERY_S):
            for parent, _, files in os.walk(directory):
                for path in (Path(parent, name) for name in files):
                    with suppress(OSError):  # renamed meanwhile
                        size = path.stat().st_size
                        if size != sizes.get(path):  # the fsync of an unchanged file still flushes the disk
                            sizes[path] = size
                            sync(path)

    thread = threading.Thread(target=flush, name="flush", daemon=True)
    thread.start()
    try:
        yield
    finally:
        written.set()
        thread.join()
