"""What the hardware allows: the rate of a copy on one GPU, and between two."""

import multiprocessing
import time
from typing import Any

_BYTES = 4 << 30
_COPIES = 20


def copy_rate(source: int, target: int) -> float:
    """Bytes per second of a copy from one GPU's memory to another's (or its own), in a process of its own.

    Args:
        source: of all GPUs of the machine.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, source, target))
    process.start()
    try:
        return float(ours.recv())
    finally:
        process.join()


def _measure(pipe: Any, source: int, target: int) -> None:
    import torch

    block = torch.empty(_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    other = torch.empty(_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
    other.copy_(block)
    torch.cuda.synchronize(source)
    torch.cuda.synchronize(target)
    start = time.perf_counter()
    for _ in range(_COPIES):
        other.copy_(block)
    torch.cuda.synchronize(source)
    torch.cuda.synchronize(target)
    pipe.send(_COPIES * _BYTES / (time.perf_counter() - start))
