import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from typing import Any

import torch
from torch._C import set_num_threads  # vLLM's CPU worker replaces torch's own name for it

VERIFY_S = 120.0  # loads the last layers, reads all digests back
DROP_S = 15.0  # the engine does not decode meanwhile
_POLL_S = 0.0001


class Throttle:
    """Delays between chunks on a GPU, from the cost per byte of the fastest chunk so far. None after the
    first, which compiles kernels."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._per_byte: float | None = None  # seconds
        self._share = 1.0
        self._since = clock()

    def begin(self, share: float) -> None:
        self._share = share
        self._since = self._clock()

    def delay_s(self, size_bytes: int) -> float:
        elapsed = self._clock() - self._since
        per_byte = elapsed / max(size_bytes, 1)
        if self._per_byte is None:
            self._per_byte = per_byte
            return 0.0
        self._per_byte = min(self._per_byte, per_byte)
        return max(0.0, self._per_byte * size_bytes / self._share - elapsed)

    def resume(self) -> None:
        self._since = self._clock()


class StagingThread:
    """Runs work in order, without gradients; on a GPU, on a stream beside the engine's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._engine_threads = torch.get_num_threads()
        self._executor = self._new_executor()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        return self._executor.submit(self._beside_the_engine, work, *arguments)

    def _beside_the_engine(self, work: Callable[..., Any], *arguments: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self.stream))
            return work(*arguments)

    def run(self, work: Callable[..., None], *arguments: Any, limit_s: float) -> None:
        try:
            self.submit(work, *arguments).result(limit_s)
        except FutureTimeoutError as error:
            raise RuntimeError(f"the staging thread did not finish within {limit_s:g} s") from error

    def renew(self) -> None:
        """The old thread exits after its work."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = self._new_executor()

    def _new_executor(self) -> ThreadPoolExecutor:
        if self.stream is not None:
            return ThreadPoolExecutor(1, "staging")
        # On a CPU the engine's parallel operations wait for their slowest thread.
        return ThreadPoolExecutor(1, "staging", set_num_threads, (max(1, self._engine_threads // 4),))


def wait_for(event: torch.Event) -> None:
    # event.synchronize() spins, on a core and in the driver, beside the thread that decodes.
    while not event.query():
        time.sleep(_POLL_S)
