"""The thread on which a worker receives, beside the engine's own."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import torch
from torch._C import set_num_threads  # vLLM's CPU worker has replaced torch's own name for it

from deployments.thread_priority import yield_to_others

VERIFY_S = 120.0  # loads the last layers, and reads all digests back
NICE = 3  # on a CPU: about a third of a core where the engine's threads occupy all of them
_POLL_S = 0.0001
DROP_S = 15.0  # the engine does not decode meanwhile


class StagingThread:
    """Runs what is submitted, one after the other, in the order in which it was submitted."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._threads = torch.get_num_threads()  # of the engine
        self._executor = self._new_executor()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        return self._executor.submit(work, *arguments)

    def run(self, work: Callable[..., None], *arguments: Any, limit_s: float) -> None:
        """Run it after what was submitted before, and wait for its end.

        Raises:
            RuntimeError: the thread hangs in something that nobody can end.
        """
        try:
            self.submit(work, *arguments).result(limit_s)
        except FutureTimeoutError as error:
            raise RuntimeError(f"the staging thread has not ended its work within {limit_s:g} s") from error

    def renew(self) -> None:
        """A new thread; the old one ends with what it is doing."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = self._new_executor()

    def _new_executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="staging", initializer=None if self.stream else self._yield
        )

    def _yield(self) -> None:
        """On a CPU: leave the cores to the threads that decode. A parallel operation of theirs ends when the
        last of them does, so a core that is shared in full would cost twice its time."""
        yield_to_others(NICE)
        set_num_threads(max(1, self._threads // 4))


def wait_for(event: torch.Event) -> None:
    """Wait for an event of a stream, without occupying a core."""
    # Not event.synchronize(): it spins, on a core and in the driver, beside the thread that decodes.
    while not event.query():
        time.sleep(_POLL_S)
