"""Files and directories that are complete whenever they have their name, also after a crash of the host.

They are written under another name, synced and renamed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(final: Path, partial: Path | None = None) -> Iterator[Path]:
    """Where to write a file or a directory, which gets its name, durably, when the block ends.

    Args:
        partial: the name until then, where several processes may write the same; None: `.NAME.partial`.

    Raises:
        OSError: it cannot be written. What had the name before stays.
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
    except BaseException:  # whatever ends the block, what it wrote is incomplete
        with suppress(OSError):
            aside.unlink()  # it may be what fills the disk
        shutil.rmtree(aside, ignore_errors=True)
        raise


def rename(path: Path, final: Path) -> None:
    """Durable when it returns."""
    path.replace(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """What a file has, or which names a directory has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
