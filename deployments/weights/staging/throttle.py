"""Limits how much of the device's time staging takes beside running requests: delays between chunks.

The cost of a chunk is estimated from the fastest chunk so far, in seconds per byte. A chunk that was waited
for (the trainer gathers its layers, a peer is late) took longer without using the device.
"""

import time
from collections.abc import Callable


class Throttle:
    """Delays between the chunks of one payload.

    Args:
        share: of the time that staging may take from the device, in (0, 1]; 1 means no delays.
        clock: seconds, never going back.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._per_byte = float("inf")  # seconds
        self._since = clock()

    def delay_s(self, size_bytes: int) -> float:
        """The seconds to wait after a chunk of this size that the device has finished.

        Time for which the chunk was waited for counts as delay.
        """
        elapsed = self._clock() - self._since
        self._per_byte = min(self._per_byte, elapsed / max(size_bytes, 1))
        return max(0.0, self._per_byte * size_bytes / self._share - elapsed)

    def resume(self) -> None:
        """The delay is over; the next chunk begins."""
        self._since = self._clock()
