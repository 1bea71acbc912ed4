"""The thread on which a worker receives, beside the engine's own."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import torch

VERIFY_S = 120.0  # loads the last layers, and reads all digests back
_POLL_S = 0.0001
DROP_S = 15.0  # the engine does not decode meanwhile


class StagingThread:
    """Runs what is submitted, one after the other, in the order in which it was submitted."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._executor = _executor()

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
        self._executor = _executor()


def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")


def wait_for(event: torch.Event) -> None:
    """Wait for an event of a stream, without occupying a core."""
    # Not event.synchronize(): it spins, on a core and in the driver, beside the thread that decodes.
    while not event.query():
        time.sleep(_POLL_S)
