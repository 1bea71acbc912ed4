"""Where an engine's workers run."""

from pathlib import Path
from typing import Any

import pytest

from app.main import IN_ENGINE_PROCESS, THREADS_BIND, executor, staging, trainer_spec
from app.settings.config import AppConfig, parse_config
from deployments.trainer.spec import TrainerSpec
from tests.app.settings.complaints import COLOCATED, SEPARATE
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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "automatic"),
        ({"engine": {"extra": {"enable_lora": True}}}, "host"),
        ({"device": "cuda", "weights": {"transport": "nccl"}}, "host"),
        ({"weights": {"staging": "host"}}, "host"),
        ({"weights": {"staging": "device"}}, "device"),
        (COLOCATED, "device"),
        (SEPARATE | {"weights": {"transport": "nccl", "staging": "none"}}, "none"),
    ],
)
def test_the_staging_is_the_configured_one_or_that_of_the_device(
    settings: dict[str, Any], expected: str
) -> None:
    assert staging(parse_config({"model": "m", **settings})) == expected


def test_a_trainers_spec_comes_from_all_sections() -> None:
    store = {"path": "v", "keep": 5}
    config = parse_config(
        {"model": "m", **SEPARATE, "state_dir": "/s", "store": store, "trust_remote_code": True}
    )
    assert config.trainer is not None
    assert trainer_spec(config, config.trainer, "/models/m") == TrainerSpec(
        config=config.trainer,
        model="/models/m",
        device="cuda",
        store_dir="/s/v",
        transport="nccl",
        chunk_bytes=512 << 20,
        native=False,
        trust_remote_code=True,
    )


def test_without_staging_the_trainer_sends_with_vllms_own_engine() -> None:
    weights = {"transport": "nccl", "staging": "none", "chunk_bytes": 1 << 20}
    config = parse_config({"model": "m", **SEPARATE, "weights": weights})
    assert config.trainer is not None
    spec = trainer_spec(config, config.trainer, "/models/m")
    assert (spec.native, spec.chunk_bytes) == (True, 1 << 20)


def test_the_trainer_begins_with_the_revision_that_the_replicas_load() -> None:
    config = parse_config({"model": "org/m", **SEPARATE, "engine": {"extra": {"revision": "v2"}}})
    assert config.trainer is not None
    assert trainer_spec(config, config.trainer, "org/m").revision == "v2"
