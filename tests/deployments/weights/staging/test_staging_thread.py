"""The engine's thread never waits for ever for the staging thread."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deployments.weights.staging import transfer_engine as engine_module
from deployments.weights.staging.host import HostStaging
from deployments.weights.staging.staging_thread import StagingThread, Throttle
from tests.deployments.weights.staging.memory_worker import MemoryWorker, weights, write_checkpoint

HANGS = r"^the staging thread did not finish within 0\.2 s$"


def test_work_runs_in_order_and_its_error_is_the_callers() -> None:
    order: list[int] = []
    thread = StagingThread(torch.device("cpu"))
    thread.submit(order.append, 1)
    thread.run(order.append, 2, limit_s=5.0)
    assert order == [1, 2]

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match=r"^no$"):
        thread.run(fail, limit_s=5.0)


class Endless(HostStaging):
    """Has always one more layer to prepare."""

    def finalize(self, *, complete: bool, rest: Callable[[], None]) -> list[str]:
        while True:
            rest()
            time.sleep(0.001)


def test_a_version_that_is_dropped_is_not_prepared_any_further(tmp_path: Path) -> None:
    worker = MemoryWorker(write_checkpoint(tmp_path / "model"))
    worker.engine.staging = Endless(worker.model, worker.vllm_config.model_config)
    worker.staging_receive(worker.offer("p", weights(2.0)), 0.5, True, None)
    worker.staging_drop()  # raises if the thread does not end
    worker.engine.shutdown()


@pytest.mark.parametrize("call", ["drop", "shutdown"])
def test_a_worker_whose_staging_hangs_says_so_and_goes_on(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "DROP_S", 0.2)
    worker = MemoryWorker(write_checkpoint(tmp_path / "model"))
    go_on = threading.Event()
    try:
        worker.start_weight_update()
        worker.engine._thread.submit(go_on.wait, 60.0)  # in a call that nobody can end
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=HANGS):
            getattr(worker.engine, call)()
        assert time.monotonic() - start < 5.0
    finally:
        go_on.set()
    monkeypatch.undo()
    worker.engine.shutdown()


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
