"""A disk on which no file grows, as the kernel sees it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deployments.controller.journal import NAME


@contextmanager
def full_disk(state_dir: Path) -> Iterator[None]:
    """No file of this process can become longer than the journal in this directory is now."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((state_dir / NAME).stat().st_size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
