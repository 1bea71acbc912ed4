from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.weights.transports.transport_contract import make_fleet, stop, weights
from tests.deployments.weights.transports.transport_fleet import Fleet, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, weights(0))
    return directory


@pytest.fixture
def fleet(transport: str, checkpoint: Path) -> Iterator[Fleet]:
    made = make_fleet(transport, checkpoint)
    yield made
    for receiver in made.receivers:
        stop(receiver)
