"""A disk on which no file grows, as the kernel sees it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def full_disk(state_dir: Path) -> Iterator[None]:
    """No file of this process can become longer than those in this directory are now."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    longest = max(each.stat().st_size for each in state_dir.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
