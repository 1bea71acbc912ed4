"""What a trainer reads before it begins: the fleet, as one vLLM server describes itself."""

import time

import pytest

from tests.fleet.deployed import MODEL, Fleet
from tests.fleet.talk import succeeded

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(300)]


def test_server_info_is_that_of_one_server(fleet: Fleet) -> None:
    with fleet.client() as client:
        shown = succeeded(client.get("/server_info?config_format=json")).json()["vllm_config"]
        assert shown["weight_transfer_config"] == {"backend": "shm"}
        assert shown["lora_config"] is None
        assert shown["model_config"]["dtype"] == "torch.float32"
        assert shown["parallel_config"]["data_parallel_size"] == 1
        assert shown["model_config"]["served_model_name"] == MODEL
        text = succeeded(client.get("/server_info")).json()
        assert "data_parallel_size=1" in text["vllm_config"] and text["vllm_env"] == text["system_env"] == {}
        assert client.get("/server_info?config_format=xml").status_code == 400


def test_a_sleep_without_memory_is_answered_as_vllm_answers_it(fleet: Fleet) -> None:
    with fleet.client() as client:
        assert succeeded(client.post("/sleep?level=0")).json() == {"status": "sleeping", "level": 0}
        assert succeeded(client.get("/is_sleeping")).json() == {"is_sleeping": True}
        woken = succeeded(client.post("/wake_up?tags=scheduling")).json()
        assert woken == {"status": "awake", "tags": ["scheduling"]}
        assert succeeded(client.get("/is_sleeping")).json() == {"is_sleeping": False}


def test_the_document_has_the_routes_of_both(fleet: Fleet) -> None:
    wanted = {"/v1/completions", "/inference/v1/generate", "/server_info", "/fleet", "/pause"}
    deadline = time.monotonic() + 60.0
    with fleet.client() as client:
        # Ours alone while no replica says its own within a few seconds: a host may be that slow.
        while not (paths := succeeded(client.get("/openapi.json")).json()["paths"]).keys() >= wanted:
            assert time.monotonic() < deadline, paths.keys()
            time.sleep(1.0)
    assert "/collective_rpc" not in paths and "/inference/v1/abort_requests" not in paths
