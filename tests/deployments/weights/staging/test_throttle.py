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


def used(clock: Clock, share: float, seconds: float = 0.5) -> Throttle:
    """A throttle that has seen one chunk of 1000 bytes."""
    throttle = Throttle(clock)
    throttle.begin(1.0)
    chunk(throttle, clock, seconds)
    throttle.begin(share)
    return throttle


def test_a_tenth_of_the_time_is_taken(clock: Clock) -> None:
    throttle = used(clock, 0.1)
    assert [chunk(throttle, clock, 0.5) for _ in range(3)] == pytest.approx([4.5] * 3)
    assert chunk(throttle, clock, 1.0, size_bytes=2000) == pytest.approx(9.0)


def test_the_whole_share_has_no_delays(clock: Clock) -> None:
    throttle = used(clock, 1.0)
    assert [chunk(throttle, clock, seconds) for seconds in (0.5, 2.0, 0.5)] == [0.0] * 3


def test_time_for_which_a_chunk_was_waited_for_counts_as_delay(clock: Clock) -> None:
    throttle = used(clock, 0.1)
    assert chunk(throttle, clock, 3.0) == pytest.approx(2.0)
    assert chunk(throttle, clock, 100.0) == 0.0


def test_the_first_chunk_of_an_engine_which_compiles_kernels_delays_nothing(clock: Clock) -> None:
    """Nine times its 1.2 s made the first publish of 1.7B at a share of 0.1 take twelve seconds."""
    throttle = Throttle(clock)
    throttle.begin(0.1)
    assert chunk(throttle, clock, 1.2) == 0.0
    assert [chunk(throttle, clock, 0.01) for _ in range(3)] == pytest.approx([0.09] * 3)


def test_what_a_chunk_costs_is_known_from_the_payloads_before(clock: Clock) -> None:
    throttle = used(clock, 0.1)
    throttle.begin(0.25)
    assert chunk(throttle, clock, 4.0) == 0.0, "it was waited for"
    assert chunk(throttle, clock, 0.5) == pytest.approx(1.5)


def test_the_time_between_payloads_is_not_that_of_a_chunk(clock: Clock) -> None:
    throttle = used(clock, 0.1)
    clock.now += 60.0
    throttle.begin(0.1)
    assert chunk(throttle, clock, 0.5) == pytest.approx(4.5)


def test_a_chunk_without_bytes_is_no_division_by_zero(clock: Clock) -> None:
    assert chunk(used(clock, 0.1), clock, 0.5, size_bytes=0) == 0.0
