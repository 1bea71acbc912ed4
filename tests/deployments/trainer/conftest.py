from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.trainer.spec import TrainerSpec
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import small_spec


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerInProcess]:
    """Its store is that of `one_worker.small_spec`."""
    controller = ControllerInProcess(tmp_path / "state")
    yield controller
    controller.close()


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    return small_spec(tmp_path)
