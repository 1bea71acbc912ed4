"""Rests between chunks: what was only waited for is no work."""

import pytest

from deployments.weights.staging.throttle import Pace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("deployments.weights.staging.throttle.time.perf_counter", clock)
    return clock


def chunk(pace: Pace, clock: Clock, seconds: float, size_bytes: int = 1000) -> float:
    clock.now += seconds
    rest = pace.rest(size_bytes)
    clock.now += rest
    pace.go_on()
    return rest


def test_a_tenth_of_the_time_is_taken(clock: Clock) -> None:
    pace = Pace(0.1)
    assert [chunk(pace, clock, 0.5) for _ in range(3)] == pytest.approx([4.5] * 3)
    assert chunk(pace, clock, 1.0, size_bytes=2000) == pytest.approx(9.0)


def test_time_that_a_chunk_was_waited_for_is_rest(clock: Clock) -> None:
    pace = Pace(0.1)
    chunk(pace, clock, 0.5)
    assert chunk(pace, clock, 3.0) == pytest.approx(2.0)
    assert chunk(pace, clock, 100.0) == 0.0


def test_the_first_chunks_that_were_slow_do_not_count_for_long(clock: Clock) -> None:
    pace = Pace(0.25)
    assert chunk(pace, clock, 8.0) == pytest.approx(24.0)
    assert chunk(pace, clock, 0.5) == pytest.approx(1.5)
