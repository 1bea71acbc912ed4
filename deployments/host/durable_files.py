"""Files and directories that are complete once they have their name, also after a crash of the host."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
