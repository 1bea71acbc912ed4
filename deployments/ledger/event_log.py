"""What happened to the fleet, newest last, for people, `/fleet/events` and `/fleet/rounds`; bounded.

The newest rounds are kept whole. Of older ones in a large fleet the timings of each replica are dropped: two
hundred rounds of a thousand replicas would be 20 MB of JSON.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from pydantic import JsonValue

from deployments.ledger.decisions import KEPT_ROUNDS
from deployments.protocol.publishing import RoundReport
from deployments.protocol.status import Event

KEPT_TIMINGS = 2000  # of replicas, over all rounds; those of the newest round are kept however many they are
ID_SPAN = 10**9  # numbers that one controller process can give out before those of the next begin


class EventLog:
    """Events with increasing ids; a restarted controller's ids are above the earlier ones."""

    def __init__(self, capacity: int = 1000) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._next_id = 1

    def start_generation(self, generation: int) -> None:
        self._next_id = generation * ID_SPAN + 1

    def record(self, event: str, now: float, **fields: JsonValue) -> None:
        self._events.append(Event(event_id=self._next_id, name=event, at=now, fields=fields))
        self._next_id += 1

    def since(self, event_id: int) -> list[Event]:
        """Events with a greater id, oldest first."""
        newer = itertools.takewhile(lambda event: event.event_id > event_id, reversed(self._events))
        return list(newer)[::-1]


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
