import heapq
from collections import Counter
from dataclasses import dataclass, field

import pytest

from deployments.router.router import MAX_PACING_S, RETRIES_PER_ADMITTED, RetryAfterPacing
from tests.clock import Clock


@dataclass(slots=True)
class Seen:
    refused: Counter[int] = field(default_factory=Counter)  # by second
    served: int = 0  # in the second half


def clients_ask(count: int, *, places: int, takes_s: float, rests_s: float = 0.0, seconds: int) -> Seen:
    """Clients that come again as they are told, or `rests_s` after they were served."""
    clock = Clock()
    began, end = clock.now, clock.now + seconds
    pacing, running, seen = RetryAfterPacing(clock), 0, Seen()
    events = [(began + number / count, number, "asks") for number in range(count)]
    while events[0][0] < end:
        clock.now, number, kind = heapq.heappop(events)
        if kind == "ends":
            running -= 1
            seen.served += clock.now > (began + end) / 2
            heapq.heappush(events, (clock.now + rests_s, number, "asks"))
        elif running < places:
            running += 1
            pacing.admitted()
            heapq.heappush(events, (clock.now + takes_s, number, "ends"))
        else:
            seen.refused[int(clock.now - began)] += 1
            heapq.heappush(events, (clock.now + round(pacing.retry_after_s()), number, "asks"))
    return seen


@pytest.mark.parametrize("rests_s", [0.0, 3.0])
def test_retries_of_a_thousand_clients_are_paced(rests_s: float) -> None:
    seen = clients_ask(1280, places=128, takes_s=0.6, rests_s=rests_s, seconds=60)
    begun_per_s = 128 / 0.6
    refused = sum(seen.refused[second] for second in range(30, 60)) / 30
    assert refused < 1.2 * RETRIES_PER_ADMITTED * begun_per_s
    assert seen.served > 0.85 * 30 * begun_per_s


def test_pacing_forgets_clients_that_do_not_return() -> None:
    clock = Clock()
    pacing = RetryAfterPacing(clock)
    for _ in range(10_000):
        pacing.retry_after_s()
    clock.now += MAX_PACING_S
    assert pacing.retry_after_s() < 1.1
