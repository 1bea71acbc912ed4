"""How many tokens a step of an engine on a CPU may have."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from deployments.replica.server_arguments import EngineSpec, FleetEngineArgs, server_arguments, step_tokens
from tests.tiny_models import save_tiny_llama


@pytest.mark.parametrize(("threads", "tokens"), [(1, 256), (2, 256), (8, 1024), (32, 4096)])
def test_step_tokens_grow_with_threads(threads: int, tokens: int) -> None:
    assert step_tokens(threads) == tokens


@pytest.mark.skipif(not current_platform.is_cpu(), reason="of engines on CPUs")
@pytest.mark.parametrize(
    ("threads", "arguments", "tokens"),
    [
        ("2", {}, 256),
        ("64", {}, 2048),  # vLLM's default
        ("2", {"max_num_seqs": 512}, 512),
        ("2", {"max_num_batched_tokens": 1024}, 1024),
        ("2", {"enable_chunked_prefill": False}, 512),  # of the longest request
    ],
)
def test_step_limit_yields_to_configured_and_required_limits(
    threads: str, arguments: dict[str, Any], tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    spec = EngineSpec(
        model=str(save_tiny_llama(tmp_path, seed=1)),
        served_model_name="tiny",
        backend="shm",
        staging="host",
        arguments={"dtype": "float32", "max_model_len": 512, "max_num_seqs": 64, **arguments},
    )
    config: VllmConfig = FleetEngineArgs.from_cli_args(server_arguments(spec)).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )
    assert config.scheduler_config.max_num_batched_tokens == tokens
