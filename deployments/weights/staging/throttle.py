"""How fast a version is staged beside requests that run: chunk by chunk, with rests.

What a chunk costs is known by the fastest one so far, in seconds a byte: a chunk that was waited for (the
trainer gathers its layers, a peer is late) took longer without taking anything from the device.
"""

import time


class Pace:
    """Args:
    share: of the time that staging may take from the device; 1: without rests.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._per_byte = float("inf")  # seconds
        self._since = time.perf_counter()

    def rest(self, size_bytes: int) -> float:
        """The seconds to rest after a chunk that the device is through with; the time for which the chunk was
        waited for counts as rest."""
        elapsed = time.perf_counter() - self._since
        self._per_byte = min(self._per_byte, elapsed / max(size_bytes, 1))
        return max(0.0, self._per_byte * size_bytes / self._share - elapsed)

    def go_on(self) -> None:
        """After the rest."""
        self._since = time.perf_counter()
