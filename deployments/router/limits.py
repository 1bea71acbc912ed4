"""The limits of one router replica, and when refused clients are told to come back."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """What a router admits and how long it waits; the settings are in `RouterConfig`."""

    max_in_flight: int  # requests of clients; one that is split has one place
    max_body_bytes: int
    max_sequences: int  # of one request: prompts times answers to each
    find_replica_timeout_s: float  # how long a request looks for a replica; generating is not looking
    weight_timeout_s: float  # how long it waits for a version, without x-weight-timeout
    load_factor: float  # times the mean load, above which a replica gets no sessions and prefixes of its own
    prefix_affinity: bool  # requests without a session go where the beginning of their prompt is cached

    def with_settings(self, settings: Mapping[str, float]) -> "RouterLimits":
        """The same with what a live fleet may change, by the names of the settings."""
        return replace(
            self,
            max_in_flight=int(settings["max_ongoing_requests"]),
            find_replica_timeout_s=settings["request_timeout_s"],
            weight_timeout_s=settings["request_timeout_s"],
            load_factor=settings["load_factor"],
            prefix_affinity=bool(settings["prefix_affinity"]),
        )


RETRY_AFTER_S = 1.0  # no client is told to come back earlier
LEAST_PER_S = 200.0  # refusing so many is a small load, and they fill places that became free at once
PER_BEGUN = 2.0  # so many come back for each request that begins, so that no place waits for one
LONGEST_S = 20.0  # beyond that; OpenAI's clients do not wait for longer than 60
PERIOD_S = 2.0  # over which requests that begin are counted


class Returns:
    """Spreads the return of refused clients: one after the other, at a rate that the router bears.

    If all of a thousand came back after a second, refusing them would cost more than the answers of those who
    are served, and control routes would wait behind them.

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
