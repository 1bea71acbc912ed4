"""A replica that was loaded from a version of the store still stores others after that one was removed."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.protocol.publishing import LACKING
from deployments.protocol.reports import StoreResult
from deployments.weights.staging.reports import from_wire
from tests.deployments.weights.staging.memory_worker import MemoryWorker, weights, write_checkpoint

TIMEOUT_S = 20.0
FROZEN = {"tower.w": torch.ones(2)}  # which the publisher does not have


def checkpoint(directory: Path, tower: float) -> Path:
    write_checkpoint(directory)
    tower_of = {name: tensor * tower for name, tensor in FROZEN.items()}
    save_file({**dict(weights(0.0)), **tower_of}, directory / "model.safetensors")
    return directory


def started_from_a_version(base: Path, version: Path) -> MemoryWorker:
    return MemoryWorker(base, loaded=version)


def caught_up_with_a_version(base: Path, version: Path) -> MemoryWorker:
    worker = MemoryWorker(base)
    worker.load_checkpoint(str(version))
    return worker


@pytest.fixture(params=[started_from_a_version, caught_up_with_a_version])
def worker(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MemoryWorker]:
    make: Callable[[Path, Path], MemoryWorker] = request.param
    (tmp_path / "store").mkdir()
    version = checkpoint(tmp_path / "store" / "v00000003", tower=3.0)
    worker = make(checkpoint(tmp_path / "model", tower=1.0), version)
    yield worker
    worker.engine.shutdown()


def stored(worker: MemoryWorker, version: int, directory: Path) -> StoreResult:
    worker.init_weight_transfer_engine({LACKING: list(FROZEN)})
    worker.staging_receive(worker.offer("p", weights(2.0)), share=1.0, begins=True, retain_version=version)
    worker.engine._thread.submit(lambda: None).result(TIMEOUT_S)
    worker.finish_weight_update()
    worker.staging_store(version, None, str(directory), "fleet", None)
    assert worker.engine.version_writer.wait(TIMEOUT_S)
    return from_wire(StoreResult, worker.staging_store_state())


def test_a_version_is_stored_after_the_one_it_was_loaded_from_is_gone(
    worker: MemoryWorker, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    assert stored(worker, 4, store).problem == ""
    shutil.rmtree(store / "v00000003")
    assert stored(worker, 5, store).problem == ""
    assert (store / "v00000005" / "config.json").is_file()
    tower = load_file(store / "v00000005" / "model.safetensors")["tower.w"]
    assert tower.tolist() == [3.0, 3.0], "as the live model was loaded, and not as the fleet once began"
