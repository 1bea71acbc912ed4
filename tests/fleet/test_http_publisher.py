"""An outside trainer with vLLM's own HTTP client, and everything that such a caller can do wrong."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import torch
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

from deployments.host.shared_memory import Segment
from deployments.vllm_plugin import register
from deployments.weights.transports.shm import ShmTrainerInitInfo, block_of
from deployments.weights.wire.chunk_layout import describe, pack, plan_chunks
from tests.fleet.deployed import Fleet
from tests.fleet.talk import complete, on_every_replica, succeeded, train_and_publish
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(300)]
register()


class AlteredSource(WeightSource):
    """A model's tensors with one change."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in tiny_llama(seed).named_parameters()}


def publish(fleet: Fleet, source: WeightSource) -> HTTPVLLMWeightSyncClient:
    client = HTTPVLLMWeightSyncClient(fleet.url, timeout=60)
    engine = WeightTransferTrainerFactory.trainer_init(
        ShmTrainerInitInfo(rank=0), client=client, source=source
    )
    engine.send_weights()
    return client


def reference(seed: int, prompt: list[int], count: int) -> list[int]:
    output = tiny_llama(seed).generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return [int(token) for token in output[0, len(prompt) :]]


def test_vllms_http_client_drives_a_round_on_both_replicas(fleet: Fleet) -> None:
    with fleet.client() as http:
        before = fleet.version()
        assert http.get("/get_world_size").json() == {"world_size": 2}
        client = publish(fleet, ModuleSource(tiny_llama(11)))
        client.shutdown_weight_transfer_engine()
        for answer in on_every_replica(http, max_tokens=16).values():
            assert answer.token_ids == reference(11, [5, 6, 7, 8, 9], 16)
            assert answer.version == before + 1
        assert http.get("/weight_info").json() == {"weight_version": str(before + 1)}


def test_a_label_of_the_caller_stands_beside_the_version(fleet: Fleet) -> None:
    client = HTTPVLLMWeightSyncClient(fleet.url, timeout=60)
    engine = WeightTransferTrainerFactory.trainer_init(
        ShmTrainerInitInfo(rank=0), client=client, source=ModuleSource(tiny_llama(12))
    )
    finish = client.finish_weight_update
    client.finish_weight_update = lambda version=None: finish("step-12")  # type: ignore[method-assign]
    engine.send_weights()
    assert httpx.get(f"{fleet.url}/weight_info").json() == {"weight_version": "step-12"}


def test_an_update_that_is_incomplete_is_refused_and_changes_nothing(fleet: Fleet) -> None:
    """Other faults: `test_read_parts` of the staging, and the tests of the transports."""
    word = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: tensor for name, tensor in tensors_of(13).items() if name != word}
    with fleet.client() as http:
        version, before = fleet.version(), complete(http).token_ids
        with pytest.raises(requests.HTTPError) as caught:
            publish(fleet, AlteredSource(tensors))
        assert caught.value.response.status_code == 400
        assert word in caught.value.response.json()["error"]["message"]
        assert unchanged(fleet, http, version, before)


def test_torn_bytes_are_found_by_their_digest(fleet: Fleet) -> None:
    good = tensors_of(14)
    metadata = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in good.items()]
    (chunk,) = plan_chunks(metadata, 1 << 40)
    segment = Segment(chunk.size_bytes)
    block = block_of(segment)
    try:
        pack(chunk, iter(good.items()), block)
        block[chunk.entries[3].offset + 5] ^= 1
        with fleet.client() as http:
            version, before = fleet.version(), complete(http).token_ids
            start(http)
            info = {"segment": segment.name, **describe(metadata)}
            answer = http.post("/update_weights", json={"update_info": info})
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert "digest" in message and chunk.entries[3].name in message
            assert unchanged(fleet, http, version, before)
    finally:
        segment.close()


def start(http: httpx.Client) -> None:
    succeeded(http.post("/init_weight_transfer_engine", json={"init_info": {}}))
    succeeded(http.post("/start_weight_update"))


def unchanged(fleet: Fleet, http: httpx.Client, version: int, before: list[int]) -> bool:
    """Same version, same answers, all replicas still serving, and the next round works."""
    answers = on_every_replica(http)
    assert fleet.version() == version
    assert all(answer.token_ids == before for answer in answers.values())
    assert train_and_publish(http) == version + 1
    return True


def test_calls_in_the_wrong_order_are_conflicts(fleet: Fleet) -> None:
    with fleet.client() as http:
        version = fleet.version()
        finish = http.post("/finish_weight_update")
        assert finish.status_code == 409 and "start_weight_update" in finish.json()["error"]["message"]
        update = http.post("/update_weights", json={"update_info": {}})
        assert update.status_code == 409
        start(http)
        again = http.post("/start_weight_update")
        assert again.status_code == 409 and "twice" in again.json()["error"]["message"]
        empty = http.post("/finish_weight_update")
        assert empty.status_code == 400 and "has brought no payload" in empty.json()["error"]["message"]
        assert fleet.version() == version


def test_a_second_publisher_is_refused_while_a_round_is_open(fleet: Fleet) -> None:
    with fleet.client() as http:
        start(http)
        refused = http.post("/train/publish", json={})
        assert refused.status_code == 409
        assert "'http'" in refused.json()["error"]["message"]
        http.post("/finish_weight_update")  # incomplete: ends the round and gives the lease back
        train_and_publish(http)


def test_pickled_handles_are_refused(fleet: Fleet) -> None:
    with fleet.client() as http:
        start(http)
        answer = http.post("/update_weights", json={"update_info": {"ipc_handles_pickled": "gASVAAAA"}})
        assert answer.status_code == 400
        assert "allow_pickled_ipc_over_http" in answer.json()["error"]["message"]
        http.post("/finish_weight_update")


@pytest.mark.parametrize(
    ("route", "content", "status"),
    [
        ("/update_weights", b"{not json", 400),
        ("/update_weights", b"[1, 2]", 400),
        ("/v1/completions", b"{not json", 400),
        ("/v1/completions", b'{"prompt": "' + b"x" * (2 << 20) + b'"}', 413),
        ("/update_weights", b"x" * (2 << 20), 413),
        ("/no/such/route", b"{}", 404),
        ("/pause?mode=nap", b"", 400),
    ],
)
def test_malformed_calls_get_errors_of_one_shape(
    fleet: Fleet, route: str, content: bytes, status: int
) -> None:
    answer = httpx.post(
        f"{fleet.url}{route}", content=content, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == status
    error: dict[str, Any] = answer.json()["error"]
    assert {"type", "message", "detail"} <= error.keys() and error["message"]
