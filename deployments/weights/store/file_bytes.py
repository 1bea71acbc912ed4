"""Bytes of a file by plain reads. Not memory-mapped: a file that shrinks meanwhile would end the process, and
one that is overwritten would change tensors that were verified."""

import os
import stat
from collections.abc import Callable
from io import FileIO
from pathlib import Path

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
