from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deployments.trainer.spec import TrainerSpec
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
