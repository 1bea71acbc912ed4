from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.trainer.spec import TrainerSpec
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import spec_of


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerInProcess]:
    """Its store is that of `one_worker.small_spec`."""
    controller = ControllerInProcess(tmp_path / "state")
    yield controller
    controller.close()


@pytest.fixture
def spec(tmp_path: Path, request: pytest.FixtureRequest) -> TrainerSpec:
    """Of what a module says that it TRAINS, or else of all weights."""
    return spec_of(tmp_path, getattr(request.module, "TRAINS", "all"))
