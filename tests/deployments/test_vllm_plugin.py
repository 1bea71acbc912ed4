"""What a replica has compiled serves its successor, which starts from another directory."""

from dataclasses import replace
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from deployments.replica.server_arguments import EngineSpec, server_arguments
from deployments.vllm_plugin import register
from tests.tiny_models import save_tiny_llama

register()
DRAFTS = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 1}


def key(spec: EngineSpec) -> str:
    """Of vLLM's compile cache and of its startup plan."""
    found: str = AsyncEngineArgs.from_cli_args(server_arguments(spec)).create_engine_config().compute_hash()
    return found


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    model = save_tiny_llama(tmp_path / "base", seed=1)
    return EngineSpec(
        model=str(model),
        served_model_name="tiny",
        backend="shm",
        staging="host",
        arguments={"dtype": "float32", "gpu_memory_utilization": 0.5, "speculative_config": DRAFTS},
    )


def test_a_stored_version_is_compiled_as_its_base_is(spec: EngineSpec, tmp_path: Path) -> None:
    version = save_tiny_llama(tmp_path / "versions" / "7", seed=2)
    assert key(spec.at(str(version))) == key(spec)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "bfloat16"},
        {"max_model_len": 64},
        {"gpu_memory_utilization": 0.4},
        {"limit_mm_per_prompt": {"image": 2}},
        {"speculative_config": {**DRAFTS, "num_speculative_tokens": 8}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_settings_are_compiled_or_measured_anew(spec: EngineSpec, changed: dict[str, object]) -> None:
    assert key(replace(spec, arguments={**spec.arguments, **changed})) != key(spec)


def test_another_architecture_is_compiled_anew(spec: EngineSpec, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "other", seed=1, layers=3)
    assert key(spec.at(str(other))) != key(spec)
