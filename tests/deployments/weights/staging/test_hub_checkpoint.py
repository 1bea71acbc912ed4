"""A worker whose engine was loaded from a hub id: what the hub's cache has is what an update must have."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.protocol.publishing import LACKING
from deployments.protocol.reports import Outcome, StoreResult
from deployments.weights.staging.reports import from_wire
from tests.deployments.weights.staging.memory_worker import (
    TIMEOUT_S,
    MemoryWorker,
    receive,
    verify,
    weights,
    write_checkpoint,
)
from tests.fake_hub import FakeHub

Start = Callable[..., MemoryWorker]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[MemoryWorker] = []

    def start(**options: Any) -> MemoryWorker:
        started.append(MemoryWorker("org/tiny", **options))
        return started[-1]

    yield start
    for worker in started:
        worker.engine.shutdown()


@pytest.mark.parametrize("shadow", [False, True], ids=["host", "shadow"])
def test_an_update_without_one_tensor_is_rejected(
    tmp_path: Path, hub: FakeHub, start: Start, shadow: bool
) -> None:
    hub.repositories["org/tiny"] = write_checkpoint(tmp_path / "snapshot")
    worker = start(shadow=shadow)
    receive(worker, weights(2.0)[:1])
    state = verify(worker)
    assert (state.outcome, state.message) == (Outcome.REJECTED, "'b' is missing")


def test_one_that_caught_up_where_the_hubs_files_are_not_asks_its_version_in_the_store(
    tmp_path: Path, hub: FakeHub, start: Start
) -> None:
    worker = start(loaded=write_checkpoint(tmp_path / "v00000001"))
    receive(worker, weights(2.0)[:1])
    assert verify(worker).message == "'b' is missing"


def test_a_stored_version_has_what_its_publisher_lacks(tmp_path: Path, hub: FakeHub, start: Start) -> None:
    snapshot = hub.repositories["org/tiny"] = write_checkpoint(tmp_path / "snapshot")
    save_file({**dict(weights(0.0)), "tower.w": torch.ones(2)}, snapshot / "model.safetensors")
    worker = start()
    worker.init_weight_transfer_engine({LACKING: ["tower.w"]})
    assert receive(worker, weights(2.0), retain_version=5).outcome is Outcome.DONE
    worker.finish_weight_update()
    worker.staging_store(5, "five", str(tmp_path / "store"), "fleet", None, 0)
    assert worker.engine.version_writer.wait(TIMEOUT_S)
    assert from_wire(StoreResult, worker.staging_store_state()).problem == ""
    version = tmp_path / "store" / "v00000005"
    assert torch.equal(load_file(version / "model.safetensors")["tower.w"], torch.ones(2))
    assert (version / "config.json").is_file()
