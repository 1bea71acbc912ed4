"""When refused clients are told to come back: one after the other, at a rate that the router bears.

If all of a thousand came back after a second, refusing them would cost more than the answers of those who
are served, and control routes would wait behind them.
"""

import time
from collections.abc import Callable

RETRY_AFTER_S = 1.0  # no client is told to come back earlier
LEAST_PER_S = 200.0  # refusing so many is a small load, and they fill places that became free at once
PER_BEGUN = 2.0  # so many come back for each request that begins, so that no place waits for one
LONGEST_S = 20.0  # beyond that; OpenAI's clients do not wait for longer than 60
PERIOD_S = 2.0  # over which requests that begin are counted


class Returns:
    """The times that one router replica has promised to refused clients.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0  # the next return that is not promised yet
        self._per_s = LEAST_PER_S
        self._begun = 0
        self._period_began = clock()

    def begun(self) -> None:
        """A request got a place."""
        self._begun += 1

    def after_s(self) -> float:
        """The seconds after which the next refused client is to come back."""
        now = self._clock()
        self._count(now)
        self._next = min(max(self._next, now) + 1 / self._per_s, now + LONGEST_S)
        return RETRY_AFTER_S + self._next - now

    def _count(self, now: float) -> None:
        elapsed = now - self._period_began
        if elapsed >= PERIOD_S:
            self._per_s = max(LEAST_PER_S, PER_BEGUN * self._begun / elapsed)
            self._begun, self._period_began = 0, now
