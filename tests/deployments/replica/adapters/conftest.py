"""A model's directory, an engine that serves it, and the adapters of a replica."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from deployments.host.shared_memory import disown
from deployments.replica.adapters.engine_adapters import EngineAdapters
from tests.deployments.replica.adapters.fake_llm import FakeLlm
from tests.tiny_models import save_tiny_llama


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("model"), 1))


@pytest.fixture
def llm(model: str) -> FakeLlm:
    return FakeLlm(model)


@pytest.fixture
def adapters(llm: FakeLlm) -> Iterator[EngineAdapters]:
    yield EngineAdapters(llm, llm.workers, SimpleNamespace(lora_requests={}), lag_s=0.0)
    disown()  # what has arrived
