from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.controller_in_process import ControllerInProcess


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerInProcess]:
    """Its store is that of `one_worker.small_spec`."""
    controller = ControllerInProcess(tmp_path / "state")
    yield controller
    controller.close()
