"""A worker whose engine was loaded from a hub id: what the hub's cache has is what an update must have."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.protocol.poll import Outcome
from tests.deployments.weights.staging.memory_worker import (
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
    assert state.outcome is Outcome.REJECTED and state.message.startswith("'b' is missing")


def test_one_that_caught_up_where_the_hubs_files_are_not_asks_its_version_in_the_store(
    tmp_path: Path, hub: FakeHub, start: Start
) -> None:
    worker = start(loaded=write_checkpoint(tmp_path / "v00000001"))
    receive(worker, weights(2.0)[:1])
    assert verify(worker).message.startswith("'b' is missing")
