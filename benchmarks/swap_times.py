"""When each worker of an engine swaps, on its host thread and on its GPU. Called in the workers."""

import time
from typing import Any


def watch(worker: Any) -> None:
    import torch

    engine = worker.weight_transfer_engine
    swap = engine.finish_weight_update

    def timed() -> None:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin = time.perf_counter()
        events[0].record()
        swap()
        events[1].record()
        engine.swapped = (begin, time.perf_counter(), *events)

    engine.finish_weight_update = timed


def last(worker: Any) -> tuple[float, float, float, float]:
    """Begin and end on the host, begin and end on the GPU, in seconds of `time.perf_counter`."""
    import torch

    begin, end, *events = worker.weight_transfer_engine.swapped
    now = torch.cuda.Event(enable_timing=True)
    now.record()
    now.synchronize()
    now_s = time.perf_counter()
    first, second = (now_s - event.elapsed_time(now) / 1e3 for event in events)
    return begin, end, first, second
