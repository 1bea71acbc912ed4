"""Two processes that are the ranks of a process group, over gloo on this host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import call_all

TIMEOUT_S = 60.0  # of every collective


def both(rank: Callable[..., None], *args: Any) -> None:
    """Run a module's function in two processes, as `rank(number, *args)`; fails with what one raises."""
    call_all(rank, [(number, *args) for number in range(2)], 4 * TIMEOUT_S, {"GLOO_SOCKET_IFNAME": "lo"})


@contextmanager
def grouped(rank: int, directory: Path) -> Iterator[None]:
    """The process group of both, which meet in a directory. The operations are tiny: one thread does them."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
