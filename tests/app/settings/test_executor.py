"""Where an engine's workers run."""

from pathlib import Path
from typing import Any

import pytest

from app.settings.config import AppConfig, parse_config
from app.settings.executor import IN_ENGINE_PROCESS, THREADS_BIND, executor
from tests.tiny_models import save_tiny_llama


def config(tmp_path: Path, device: str, **engine: Any) -> AppConfig:
    model = save_tiny_llama(tmp_path / "model", seed=0)
    transport = {"cpu": "shm", "cuda": "ipc"}[device]
    document = {"model": str(model), "state_dir": str(tmp_path), "device": device, "engine": engine}
    return parse_config(document | {"weights": {"transport": transport}})


def test_an_engine_on_a_cpu_is_one_process(tmp_path: Path) -> None:
    assert executor(config(tmp_path, "cpu")) == {"distributed_executor_backend": IN_ENGINE_PROCESS}


@pytest.mark.parametrize("bound", ["auto", "0-1"])
def test_threads_that_are_bound_need_a_process_of_their_own(tmp_path: Path, bound: str) -> None:
    assert executor(config(tmp_path, "cpu", env={THREADS_BIND: bound})) == {}


def test_several_ranks_are_several_processes(tmp_path: Path) -> None:
    chosen = executor(config(tmp_path, "cpu", tensor_parallel_size=2))
    assert chosen == {"distributed_executor_backend": "mp"}


def test_on_a_gpu_vllm_chooses(tmp_path: Path) -> None:
    assert executor(config(tmp_path, "cuda")) == {}
