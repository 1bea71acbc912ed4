"""What a trainer reads before it begins: the fleet, as one vLLM server describes itself."""

import time

import httpx
import pytest

from tests.fleet.deployed import MODEL, Fleet
from tests.fleet.losing import members
from tests.fleet.talk import complete, succeeded, train_and_publish
from tests.waiting import until

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


def test_the_document_has_the_routes_of_both(fleet: Fleet) -> None:
    wanted = {"/v1/completions", "/inference/v1/generate", "/server_info", "/fleet", "/pause"}
    with fleet.client() as client:

        def paths() -> set[str]:
            return {*succeeded(client.get("/openapi.json")).json()["paths"]}

        # Ours alone while no replica says its own within a few seconds: a host may be that slow.
        until(lambda: wanted <= paths(), 60, "the routes of a replica", pause_s=1.0)
        assert not {"/collective_rpc", "/inference/v1/abort_requests"} & paths()


def test_page_has_its_files_and_what_it_shows(fleet: Fleet) -> None:
    def generated() -> int:
        """Tokens of both replicas; an answer lacks one that is too busy to be asked."""
        found: dict[str, int] = {}

        def has_both() -> bool:
            load = succeeded(client.get("/fleet/load")).json()
            if load["dashboard"] is not None:
                assert httpx.get(f"http://{load['dashboard']}/api/version").is_success
            found.update({name: each["generated_tokens"] for name, each in load["replicas"].items()})
            return found.keys() == members(client)

        until(has_both, 60, "the load of both replicas")
        return sum(found.values())

    with fleet.client() as client:
        for path in ("/", "/page/page.js", "/page/uPlot.iife.min.js"):
            assert len(succeeded(client.get(path)).content) > 1000, path
        before = generated()
        complete(client, max_tokens=16)
        assert generated() - before >= 16
        version = train_and_publish(client)
        last = client.get("/fleet/rounds").json()["rounds"][-1]
        assert (last["version"], last["publisher"]) == (version, "trainer")
        assert sum(last["parts"].values()) == pytest.approx(last["duration_s"])
        assert last["opened_at"] < last["committed_at"] < time.time()
        assert "loss" in client.get("/train/steps").json()["steps"][-1]["values"]
