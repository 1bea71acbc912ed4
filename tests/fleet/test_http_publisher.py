"""An outside trainer with vLLM's own HTTP client, and everything that such a caller can do wrong."""

import pytest
import torch
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightSource,
    WeightTransferTrainerFactory,
)

from deployments.vllm_plugin import register
from deployments.weights.transports.shm import ShmTrainerInitInfo
from tests.fleet.deployed import Fleet
from tests.fleet.talk import on_every_replica
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(300)]
register()


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
