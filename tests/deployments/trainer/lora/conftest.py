from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deployments.trainer.spec import TrainerSpec, adapter_directory
from tests.deployments.trainer.lora.fake_adapter_controller import FakeAdapterController
from tests.deployments.trainer.lora.one_adapter import lora
from tests.deployments.trainer.one_worker import small_spec
from tests.deployments.trainer.trainer_specs import with_config


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The operations are tiny: threads that wait for each other take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    return with_config(small_spec(tmp_path), lora=lora())


@pytest.fixture
def controller(spec: TrainerSpec, tmp_path: Path) -> FakeAdapterController:
    users = tmp_path / "users"
    return FakeAdapterController(Path(spec.store_dir), adapter_directory(spec.store_dir), users)
