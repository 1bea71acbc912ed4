"""Limits of one router process, and pacing of refused clients."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """See `RouterConfig`."""

    max_in_flight: int  # client requests; a split one counts once
    max_body_bytes: int
    max_sequences: int  # per request: prompts times completions
    find_replica_timeout_s: float  # without generation
    weight_timeout_s: float  # wait for a version, without x-weight-timeout

    def with_settings(self, settings: Mapping[str, float]) -> "RouterLimits":
        """Replace the settings that may change at run time."""
        return replace(
            self,
            max_in_flight=int(settings["max_ongoing_requests"]),
            find_replica_timeout_s=settings["request_timeout_s"],
            weight_timeout_s=settings["request_timeout_s"],
        )


RETRY_AFTER_S = 1.0  # minimum
MIN_RETRIES_PER_S = 200.0  # a small load
RETRIES_PER_ADMITTED = 2.0  # keeps places from staying free
MAX_PACING_S = 20.0  # OpenAI's clients wait for 60 s at most
PERIOD_S = 2.0  # for counting admitted requests


class RetryAfterPacing:
    """Spreads the retries of refused clients. If a thousand retried after a second, refusing them would cost
    more than serving the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_retry = 0.0  # not yet given to a client
        self._per_s = MIN_RETRIES_PER_S
        self._admitted = 0
        self._period_began = clock()

    def admitted(self) -> None:
        self._admitted += 1

    def retry_after_s(self) -> float:
        now = self._clock()
        if (elapsed := now - self._period_began) >= PERIOD_S:
            self._per_s = max(MIN_RETRIES_PER_S, RETRIES_PER_ADMITTED * self._admitted / elapsed)
            self._admitted, self._period_began = 0, now
        self._next_retry = min(max(self._next_retry, now) + 1 / self._per_s, now + MAX_PACING_S)
        return RETRY_AFTER_S + self._next_retry - now
