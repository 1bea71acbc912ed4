"""The engine's thread never waits for ever for the staging thread."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deployments.weights.staging import engine as engine_module
from deployments.weights.staging.host import HostStaging
from deployments.weights.staging.staging_thread import StagingThread
from tests.deployments.weights.staging.memory_worker import MemoryWorker, weights, write_checkpoint

HANGS = r"^the staging thread has not ended its work within 0\.2 s$"


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
