"""The thread on which a worker receives, beside the engine's own."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import torch
from torch._C import set_num_threads  # vLLM's CPU worker has replaced torch's own name for it

from deployments.host.thread_priority import yield_to_others

# Limits how much of the device's time staging takes beside running requests: delays between chunks.
#
# On a CPU the system says how much a thread has used (`deployments.host.thread_priority`). On a GPU the cost
# of a chunk is estimated from the fastest chunk so far, in seconds per byte. A chunk that was waited for (the
# trainer gathers its layers, a peer is late) took longer without using the device. So did the first chunk of
# an engine, for which kernels are compiled and loaders are recorded: nothing is known after it, and it has no
# delay.


class Throttle:
    """Delays between the chunks of an engine's payloads.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._per_byte: float | None = None  # seconds
        self._share = 1.0
        self._since = clock()

    def begin(self, share: float) -> None:
        """A payload begins.

        Args:
            share: of the time that staging may take from the device, in (0, 1]; 1 means no delays.
        """
        self._share = share
        self._since = self._clock()

    def delay_s(self, size_bytes: int) -> float:
        """The seconds to wait after a chunk of this size that the device has finished.

        Time for which the chunk was waited for counts as delay.
        """
        elapsed = self._clock() - self._since
        per_byte = elapsed / max(size_bytes, 1)
        if self._per_byte is None:
            self._per_byte = per_byte
            return 0.0
        self._per_byte = min(self._per_byte, per_byte)
        return max(0.0, self._per_byte * size_bytes / self._share - elapsed)

    def resume(self) -> None:
        """The delay is over; the next chunk begins."""
        self._since = self._clock()


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
