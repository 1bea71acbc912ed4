"""What a replica's server says of itself, and which routes it has."""

import copy
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.testclient import TestClient
from vllm.config import VllmConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.dev.server_info import api_router
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from deployments.protocol.passed_routes import PASSED, REFUSED
from deployments.replica.server_arguments import EngineSpec, FleetEngineArgs, server_arguments, step_tokens
from deployments.replica.server_info import WITHHELD, add_server_info, describe, fleet_fingerprint
from tests.tiny_models import save_tiny_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture
def spec(checkpoint: Path) -> EngineSpec:
    return EngineSpec(
        model=str(checkpoint),
        served_model_name="tiny",
        backend="shm",
        staging="host",
        arguments={"dtype": "float32", "hf_token": "hf_operators_own"},
    )


@pytest.fixture
def config(spec: EngineSpec) -> VllmConfig:
    return configured(server_arguments(spec))


def configured(args: Namespace) -> VllmConfig:
    made: VllmConfig = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    return made


def vllms_own(config: VllmConfig, config_format: str) -> Any:
    """`vllm_config` of vLLM's route, from its own router."""
    app = FastAPI()
    api_router.attach_router(app)
    app.state.vllm_config = config
    return TestClient(app).get(f"/server_info?config_format={config_format}").json()["vllm_config"]


def ours(config: VllmConfig, query: str = "") -> Any:
    app = FastAPI()
    add_server_info(app, config)
    answer = TestClient(app).get(f"/server_info{query}")
    assert answer.status_code == 200
    return answer.json()


@pytest.fixture(autouse=True)
def _without_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's route runs a dozen programs to describe the host, which is no part of ours."""
    monkeypatch.setattr(api_router, "_get_system_env_info_cached", dict)


@pytest.mark.slow
def test_server_info_is_vllms_without_secrets(config: VllmConfig) -> None:
    theirs = vllms_own(config, "json")
    assert theirs["model_config"]["hf_token"] == "hf_operators_own"
    theirs["model_config"]["hf_token"] = WITHHELD
    theirs["additional_config"] = dict.fromkeys(theirs["additional_config"], WITHHELD)
    answer = ours(config, "?config_format=json")
    assert answer.keys() == {"vllm_config", "vllm_env", "system_env"}
    assert answer["vllm_config"] == theirs


@pytest.mark.slow
def test_data_parallel_size_of_a_replica_is_hidden(config: VllmConfig) -> None:
    config.parallel_config.data_parallel_size = 4
    assert ours(config, "?config_format=json")["vllm_config"]["parallel_config"]["data_parallel_size"] == 1
    assert "data_parallel_size=1," in ours(config)["vllm_config"]
    assert config.parallel_config.data_parallel_size == 4, "the engine's own stays"


def test_late_joiner_shows_the_initial_checkpoint(
    config: VllmConfig, spec: EngineSpec, tmp_path: Path
) -> None:
    args = server_arguments(spec.at(str(save_tiny_llama(tmp_path / "v00000007", seed=2))))
    joined = configured(args)
    for mode, begin in (("full", "vllm-"), ("hash", "vllm-"), ("custom", "mine"), ("none", "None")):
        args.fingerprint_mode, args.fingerprint_value = mode, "mine"
        assert fleet_fingerprint(joined, args) == fleet_fingerprint(config, args)
        assert str(fleet_fingerprint(joined, args)).startswith(begin)
    shown, first = (ours(each, "?config_format=json")["vllm_config"] for each in (joined, config))
    assert shown["model_config"] == first["model_config"]
    assert joined.model_config.model.endswith("v00000007"), "the engine's own stays"


@pytest.mark.parametrize("config_format", ["text", "json"])
def test_server_info_withholds_secrets(config: VllmConfig, config_format: Any) -> None:
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="LMCacheConnectorV1",
        kv_role="kv_both",
        kv_connector_extra_config={"remote": {"url": "redis://kv:sesame-1@host"}, "list": ["sesame-2"]},
    )
    config.load_config.model_loader_extra_config = {"aws_access_key_id": "sesame-3"}
    config.additional_config = {**config.additional_config, "of_a_plugin": "sesame-4"}
    config.observability_config.otlp_traces_endpoint = "https://me:sesame-5@traces.example:4317/x"
    config.model_config.served_model_name = "tiny-sesame-6-operators"
    config.parallel_config.ray_runtime_env = {"env_vars": {"PLAIN": "sesame-7"}}  # type: ignore[assignment]
    environment = {
        "SLIPSTREAM_TOKEN": "sesame-6-operators",
        "VLLM_API_KEY": "sesame-8-of-vllm",
        "VLLM_LOGGING_PREFIX": "sesame-9",
        "RAY_AUTH_MODE": "disabled",
    }
    made = describe(config, config_format, environment)
    text = json.dumps(made)
    assert "sesame" not in text and "hf_operators_own" not in text
    assert made["vllm_env"] == made["system_env"] == {}
    assert "traces.example" in text and WITHHELD in text
    assert describe(config, config_format, {})["vllm_config"] != made["vllm_config"], "of the environment"


def test_staged_wire_shows_vllms_backend(config: VllmConfig) -> None:
    config.weight_transfer_config = copy.copy(config.weight_transfer_config)
    config.weight_transfer_config.backend = "staged_nccl"
    assert ours(config, "?config_format=json")["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"}
    assert config.weight_transfer_config.backend == "staged_nccl", "the engine's own is as it was"


# -- how many tokens a step of an engine on a CPU may have -----------------------------------------


@pytest.mark.parametrize(("threads", "tokens"), [(1, 256), (2, 256), (8, 1024), (32, 4096)])
def test_step_tokens_grow_with_threads(threads: int, tokens: int) -> None:
    assert step_tokens(threads) == tokens


@pytest.mark.skipif(not current_platform.is_cpu(), reason="expects what a CPU engine reports")
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


# -- routes -----------------------------------------------------------------------------------------


# What this server has only for whoever asks it directly: the fleet answers these itself.
FLEET = {"/health", "/metrics", "/openapi.json"}
SPEC = EngineSpec(model="m", served_model_name="m", backend="shm", staging="host")


@pytest.fixture(scope="module")
def server() -> Iterator[FastAPI]:
    """vLLM's own application with a replica's arguments; no engine is behind it."""
    yield build_app(server_arguments(SPEC), ("generate",))


def described(server: FastAPI) -> set[str]:
    return set(server.openapi()["paths"])


@pytest.mark.slow
def test_token_id_route_is_enabled(server: FastAPI) -> None:
    assert "/inference/v1/generate" in described(server)
    answer = TestClient(server).post("/inference/v1/generate", json={"token_ids": []})
    assert answer.status_code == 400, "it is read, and found wrong; 403: it is switched off"


@pytest.mark.slow
def test_every_server_route_is_passed_refused_or_the_fleets(server: FastAPI) -> None:
    paths = {route.path for route in server.routes if isinstance(route, APIRoute)}
    assert paths >= {"/v1/completions", "/v1/chat/completions/render", "/inference/v1/abort_requests"}
    assert paths - FLEET <= PASSED.keys() | REFUSED.keys()


def test_operator_can_disable_scale_out() -> None:
    spec = EngineSpec(
        model="m", served_model_name="m", backend="x", staging="host", arguments={"enable_scale_out": False}
    )
    assert server_arguments(spec).enable_scale_out is False
