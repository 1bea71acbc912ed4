from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app

from deployments.protocol.passed_routes import PASSED, REFUSED
from deployments.replica.server_arguments import EngineSpec, server_arguments

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
