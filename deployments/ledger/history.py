"""The rounds that ended: bounded in number, and in what is kept of each replica.

The newest rounds are kept whole. Of older ones in a large fleet the timings of each replica are dropped: two
hundred rounds of a thousand replicas would be 20 MB of JSON.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from deployments.ledger.decisions import KEPT_ROUNDS
from deployments.protocol.publishing import RoundReport

KEPT_TIMINGS = 2000  # of replicas, over all rounds; those of the newest round are kept however many they are


class RoundHistory:
    """Reports of rounds, oldest first."""

    def __init__(self) -> None:
        self._reports: deque[RoundReport] = deque(maxlen=KEPT_ROUNDS)

    def append(self, report: RoundReport) -> None:
        """The newest."""
        self._reports.append(report)
        kept = 0
        for index in range(len(self._reports) - 1, -1, -1):
            timings = self._reports[index].replicas
            kept += len(timings)
            if timings and kept > KEPT_TIMINGS and index < len(self._reports) - 1:
                self._reports[index] = replace(self._reports[index], replicas={})

    def newest_first(self) -> Iterator[RoundReport]:
        """From the newest to the oldest."""
        return reversed(self._reports)

    def all(self) -> list[RoundReport]:
        """Oldest first."""
        return list(self._reports)
