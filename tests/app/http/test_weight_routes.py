"""vLLM's routes that update weights: their order, parameters and answers."""

from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from app.http.weight_routes import agreed
from deployments.protocol.engine_state import WeightChecksums
from deployments.protocol.errors import Conflict
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import client


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/update_weights", {"update_info": {}}, "update_weights was called before start_weight_update"),
        ("/finish_weight_update", None, "finish_weight_update was called before start_weight_update"),
    ],
)
async def test_call_before_the_round_is_a_conflict(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, body: object, message: str
) -> None:
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 409 and message in answer.json()["error"]["message"]
    assert controller.lease is None


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/start_weight_update", None, "start_weight_update was called twice: round 4 is open"),
        ("/init_weight_transfer_engine", {"init_info": {}}, "round 4 is open: finish it"),
        (
            "/shutdown_weight_transfer_engine",
            None,
            "Cannot release a trainer connection during a weight update",
        ),
    ],
)
async def test_call_forbidden_during_a_round_is_a_conflict_and_keeps_the_round(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, body: object, message: str
) -> None:
    await fleet.post("/start_weight_update")
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 409 and message in answer.json()["error"]["message"]
    assert controller.round_id == 4 and controller.lease is not None


async def test_only_who_names_the_open_round_gives_it_up(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update")
    answer = await fleet.post("/abort_weight_update", json={"round_id": 3})
    assert answer.status_code == 409 and controller.round_id == 4
    assert (await fleet.post("/abort_weight_update", json={"round_id": 4})).status_code == 200
    assert controller.round_id is None and controller.lease is None


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("/init_weight_transfer_engine", b"", "expected the field 'init_info', got []"),
        ("/init_weight_transfer_engine", b'{"init_info": [1]}', "init_info: expected an object, got list"),
        ("/update_weights", b"{}", "expected the field 'update_info' or the field 'weight_dir', got []"),
        ("/update_weights", b'{"update_info": {}, "weight_dir": "/x"}', "got ['update_info', 'weight_dir']"),
        (
            "/update_weights",
            b'{"weight_dir": null}',
            "weight_dir: expected the path of a directory, got None",
        ),
        ("/update_weights", b'{"update_info": [1]}', "expected an object or a list of objects, got int"),
        ("/finish_weight_update", b'{"weight_version": 7}', "weight_version: expected a valid string, got 7"),
        ("/update_weight_version", b"{}", "expected the field 'new_version', got []"),
        ("/weight_checker", b'{"action": "compare"}', "baseline: expected an object of checksums"),
    ],
)
async def test_wrong_body_is_refused_before_anything_is_called(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, content: bytes, message: str
) -> None:
    answer = await fleet.post(path, content=content)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request"
    assert message in answer.json()["error"]["message"]
    assert controller.calls == []


async def test_unknown_fields_are_ignored_as_vllm_does(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update", content=b"not even JSON: vLLM does not read this body")
    await fleet.post("/update_weights", json={"update_info": {}})
    assert (await fleet.post("/finish_weight_update", json={"something": 1})).status_code == 200
    assert controller.label is None


@pytest.mark.parametrize("allowed", [False, True])
async def test_pickled_handles_need_the_switch(controller: FakeController, allowed: bool) -> None:
    pickled = {"names": ["a"], "ipc_handles_pickled": "gARdlC4="}  # an empty list
    read = {"names": ["a"], "ipc_handles": []}
    async with client(controller, allow_pickled_ipc=allowed) as fleet:
        await fleet.post("/start_weight_update")
        for sent in (pickled, [pickled] * 4):  # to all workers, to each
            answer = await fleet.post("/update_weights", json={"update_info": sent})
            assert answer.status_code == (200 if allowed else 400)
            assert allowed or "allow_pickled_ipc_over_http" in answer.text
    assert controller.sent == ([read, [read] * 4] if allowed else [])


# -- questions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "size"),
    [("", 4), ("?include_dp=False", 2)],
)
async def test_world_size_counts_all_workers_or_those_of_one_replica(
    fleet: httpx.AsyncClient, query: str, size: int
) -> None:
    assert (await fleet.get(f"/get_world_size{query}")).json() == {"world_size": size}


async def test_weight_version_is_the_label_or_the_number(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    assert (await fleet.get("/weight_info")).json() == {"weight_version": "3"}
    answer = await fleet.post("/update_weight_version", json={"new_version": "best"})
    assert answer.json() == {"success": True, "new_version": "best"}
    assert (await fleet.get("/weight_info")).json() == {"weight_version": "best"}
    await fleet.post("/update_weight_version", json={"new_version": ""})
    assert (await fleet.get("/weight_info")).json() == {"weight_version": ""}


async def test_checksums_are_those_of_all_workers_and_compare_with_a_baseline(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.checksums = {name: [{"a": "1"}, {"b": "2"}] for name in controller.serving}
    same = {"a": "1", "b": "2"}
    assert (await fleet.post("/weight_checker", json={"action": "checksum"})).json() == {"checksums": same}
    assert controller.operations == [WeightChecksums()]

    async def compare(baseline: dict[str, str]) -> object:
        body = {"action": "compare", "baseline": baseline}
        return (await fleet.post("/weight_checker", json=body)).json()

    assert await compare(same) == {"match": True, "mismatches": []}
    assert await compare({"a": "1", "c": "3"}) == {"match": False, "mismatches": ["b", "c"]}
    assert await compare({}) == {"match": False, "mismatches": ["a", "b"]}


def test_checksums_that_differ_between_replicas_are_named() -> None:
    with pytest.raises(Conflict, match="replicas differ in 1 tensors") as caught:
        agreed({"r0": [{"a": "1", "b": "2"}], "r1": [{"a": "1", "b": "3"}]})
    assert caught.value.detail == {"tensors": ["b"]}
    assert agreed({}) == {}


async def test_directory_is_a_whole_round_as_prime_rl_has_it(
    controller: FakeController, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    async with client(controller, checkpoint_roots=[tmp_path]) as fleet:
        answer = await fleet.post("/update_weights", json={"weight_dir": str(tmp_path)})
        assert (answer.status_code, answer.json()) == (200, {"message": "Weights updated"})
        assert controller.version == 4 and controller.lease is None
        assert controller.options[-1].persist and controller.options[-1].file_bytes == 8
        await fleet.post("/start_weight_update")
        refused = await fleet.post("/update_weights", json={"weight_dir": str(tmp_path)})
        assert refused.status_code == 409 and "'http' publishes" in refused.json()["error"]["message"]
        assert controller.round_id == 5, "the round of the other publisher continues"
