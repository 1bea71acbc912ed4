"""Limits how much of the device's time staging takes beside running requests: delays between chunks.

On a CPU the system says how much a thread has used (`deployments.thread_priority`). On a GPU the cost of a
chunk is estimated from the fastest chunk so far, in seconds per byte. A chunk that was waited for (the
trainer gathers its layers, a peer is late) took longer without using the device. So did the first chunk of an
engine, for which kernels are compiled and loaders are recorded: nothing is known after it, and it has no
delay.
"""

import time
from collections.abc import Callable


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
