"""A disk without space, as the kernel sees it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def full_disk(longest_bytes: int = 0) -> Iterator[None]:
    """No file of this process can become longer than this."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def longest_in(directory: Path) -> int:
    """The size in bytes of its longest file: those that are there can be written, and none grows."""
    return max(each.stat().st_size for each in directory.iterdir())
