"""The engine's thread never waits for ever for the staging thread."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deployments.weights.staging import transfer_engine as engine_module
from deployments.weights.staging.host import HostStaging
from deployments.weights.staging.transfer_engine import StagingThread, Throttle
from tests.clock import Clock
from tests.deployments.weights.staging.memory_worker import MemoryWorker, weights, write_checkpoint

HANGS = r"^the staging thread did not finish within 0\.2 s$"


def test_work_runs_in_order_and_raises_to_the_caller() -> None:
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

    def finalize(self, *, complete: bool, check_open: Callable[[], None]) -> list[str]:
        while True:
            check_open()
            time.sleep(0.001)


def test_dropping_an_update_stops_its_preparation(tmp_path: Path) -> None:
    worker = MemoryWorker(write_checkpoint(tmp_path / "model"))
    worker.engine.staging = Endless(worker.model, worker.vllm_config.model_config)
    worker.staging_receive(worker.offer("p", weights(2.0)), 0.5, True, None)
    worker.staging_drop()  # raises if the thread does not end
    worker.engine.shutdown()


@pytest.mark.parametrize("call", ["drop", "shutdown"])
def test_a_hung_staging_thread_is_reported(
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


def delays(throttle: Throttle, clock: Clock, *chunks: float, size_bytes: int = 1000) -> list[float]:
    """The delays after chunks that took so many seconds; they pass."""
    found = []
    for seconds in chunks:
        clock.now += seconds
        found.append(throttle.delay_s(size_bytes))
        clock.now += found[-1]
        throttle.resume()
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def throttle(clock: Clock) -> Throttle:
    """It has seen one chunk of 1000 bytes, which took half a second."""
    throttle = Throttle(clock)
    throttle.begin(1.0)
    delays(throttle, clock, 0.5)
    return throttle


@pytest.mark.parametrize(
    ("share", "chunks", "size_bytes", "expected"),
    [
        (0.1, [0.5, 0.5], 1000, [4.5, 4.5]),
        (0.1, [1.0], 2000, [9.0]),
        (0.1, [0.5], 0, [0.0]),
        (1.0, [0.5, 2.0, 0.5], 1000, [0.0, 0.0, 0.0]),
        (0.1, [3.0, 100.0], 1000, [2.0, 0.0]),
        (0.25, [4.0, 0.5], 1000, [0.0, 1.5]),
    ],
)
def test_delays_keep_staging_within_its_share(
    share: float,
    chunks: list[float],
    size_bytes: int,
    expected: list[float],
    throttle: Throttle,
    clock: Clock,
) -> None:
    clock.now += 60.0  # between payloads
    throttle.begin(share)
    assert delays(throttle, clock, *chunks, size_bytes=size_bytes) == pytest.approx(expected)


def test_the_first_chunk_has_no_delay(clock: Clock) -> None:
    throttle = Throttle(clock)
    throttle.begin(0.1)
    assert delays(throttle, clock, 1.2, 0.01, 0.01) == pytest.approx([0.0, 0.09, 0.09])
