"""What happened to the fleet, newest last, for people and `/fleet/events`; bounded."""

import itertools
from collections import deque

from pydantic import JsonValue

from deployments.protocol.status import Event

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
