"""Delays between chunks: staging takes its share of the device's time, and waiting takes nothing."""

import pytest

from deployments.weights.staging.throttle import Throttle


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def chunk(throttle: Throttle, clock: Clock, seconds: float, size_bytes: int = 1000) -> float:
    """The delay after a chunk that took so long; it passes."""
    clock.now += seconds
    delay_s = throttle.delay_s(size_bytes)
    clock.now += delay_s
    throttle.resume()
    return delay_s


def test_a_tenth_of_the_time_is_taken(clock: Clock) -> None:
    throttle = Throttle(0.1, clock)
    assert [chunk(throttle, clock, 0.5) for _ in range(3)] == pytest.approx([4.5] * 3)
    assert chunk(throttle, clock, 1.0, size_bytes=2000) == pytest.approx(9.0)


def test_the_whole_share_has_no_delays(clock: Clock) -> None:
    throttle = Throttle(1.0, clock)
    assert [chunk(throttle, clock, seconds) for seconds in (0.5, 2.0, 0.5)] == [0.0] * 3


def test_time_for_which_a_chunk_was_waited_for_counts_as_delay(clock: Clock) -> None:
    throttle = Throttle(0.1, clock)
    chunk(throttle, clock, 0.5)
    assert chunk(throttle, clock, 3.0) == pytest.approx(2.0)
    assert chunk(throttle, clock, 100.0) == 0.0


def test_slow_first_chunks_do_not_count_for_long(clock: Clock) -> None:
    throttle = Throttle(0.25, clock)
    assert chunk(throttle, clock, 8.0) == pytest.approx(24.0)
    assert chunk(throttle, clock, 0.5) == pytest.approx(1.5)


def test_a_chunk_without_bytes_is_no_division_by_zero(clock: Clock) -> None:
    assert chunk(Throttle(0.1, clock), clock, 0.5, size_bytes=0) == 0.0
