"""What happened to the fleet, newest last, for people and for `/fleet/events`: bounded, never waited on."""

from collections import deque
from typing import Any

ID_SPAN = 10**9  # numbers one controller process can give out before those of the next begin


class EventLog:
    """Small JSON dicts with increasing ids; a restarted controller's ids are above the earlier ones."""

    def __init__(self, capacity: int = 1000) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=capacity)
        self._next_id = 1

    def start_generation(self, generation: int) -> None:
        self._next_id = generation * ID_SPAN + 1

    def record(self, event: str, now: float, **fields: Any) -> None:
        self._events.append({"id": self._next_id, "event": event, "at": now, **fields})
        self._next_id += 1

    def since(self, event_id: int) -> list[dict[str, Any]]:
        """Those with a greater id, oldest first."""
        return [event for event in self._events if event["id"] > event_id]
