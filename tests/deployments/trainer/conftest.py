from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The operations are tiny: threads that wait for each other take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
