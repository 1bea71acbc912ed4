"""What a publisher lacks is stored as the fleet has it, wherever this replica was loaded from."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.protocol.publishing import LACKING
from deployments.protocol.reports import StoreResult
from deployments.weights.staging.reports import from_wire
from deployments.weights.store.manifest import VersionManifest
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import MANIFEST, Store
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
    manifest = VersionManifest(version=3, fleet_id="fleet", tensors={})
    (version / MANIFEST).write_text(manifest.encode())
    worker = make(checkpoint(tmp_path / "model", tower=1.0), version)
    yield worker
    worker.engine.shutdown()


def stored(worker: MemoryWorker, version: int, directory: Path, kept_since: int = 3) -> StoreResult:
    worker.init_weight_transfer_engine({LACKING: list(FROZEN)})
    worker.staging_receive(worker.offer("p", weights(2.0)), share=1.0, begins=True, retain_version=version)
    worker.engine._thread.submit(lambda: None).result(TIMEOUT_S)
    worker.finish_weight_update()
    worker.staging_store(version, None, str(directory), "fleet", None, kept_since)
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


def test_it_is_stored_as_another_publisher_has_changed_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    worker = MemoryWorker(checkpoint(tmp_path / "model", tower=1.0))
    result = stored(worker, 5, store.directory, kept_since=4)
    assert result.problem.startswith(
        "ValueError: its publisher lacks 1 of its tensors, first 'tower.w'; they "
    )
    assert "are those of version 4, which is not in" in result.problem and store.list() == []
    other = {**dict(weights(0.0)), "tower.w": torch.full((2,), 4.0)}
    write_version(CommittedVersion(version=4, label=None, tensors=other), store, lambda directory: None)
    assert stored(worker, 5, store.directory, kept_since=4).problem == ""
    assert load_file(store.path_of(5) / "model.safetensors")["tower.w"].tolist() == [4.0, 4.0]
    worker.engine.shutdown()


def test_the_store_is_not_read_where_nothing_is_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: Store) -> list[int]:
        raise AssertionError("a directory of many versions, on a disk of the network")

    worker = MemoryWorker(write_checkpoint(tmp_path / "model"))
    monkeypatch.setattr(Store, "list", refuse)
    worker.staging_receive(worker.offer("p", weights(2.0)), share=1.0, begins=True, retain_version=5)
    worker.engine._thread.submit(lambda: None).result(TIMEOUT_S)
    worker.finish_weight_update()
    worker.staging_store(5, None, str(tmp_path / "store"), "fleet", None, 4)
    assert worker.engine.version_writer.wait(TIMEOUT_S)
    assert from_wire(StoreResult, worker.staging_store_state()).problem == ""
    worker.engine.shutdown()
