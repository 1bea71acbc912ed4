"""What a round does with the requests that are running when it commits."""

import asyncio

import httpx
import pytest
from ray import serve
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from deployments.protocol.operations import InFlight
from deployments.protocol.publishing import RoundOptions, RoundReport
from deployments.trainer.fleet_client import FleetWeightSyncClient
from deployments.vllm_plugin import register
from deployments.weights.transports.shm import ShmTrainerInitInfo
from tests.fleet.conftest import Fleet
from tests.fleet.talk import body, complete
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]
register()


def publish(seed: int, in_flight: InFlight) -> RoundReport:
    controller = serve.get_deployment_handle("controller", app_name="slipstream")
    client = FleetWeightSyncClient(controller, "test", RoundOptions(in_flight=in_flight))
    source = ModuleSource(tiny_llama(seed))
    WeightTransferTrainerFactory.trainer_init(
        ShmTrainerInitInfo(rank=0), client=client, source=source
    ).send_weights()
    assert client.report is not None
    return client.report


async def running_during_a_round(fleet: Fleet, seed: int, in_flight: InFlight) -> list[dict[str, object]]:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=200) as client:
        calls = [
            asyncio.create_task(client.post("/v1/completions", json=body([60 + index, 4], 300)))
            for index in range(8)
        ]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(publish, seed, in_flight)
        answers = await asyncio.gather(*calls)
    assert all(answer.status_code == 200 for answer in answers)
    return [answer.json()["choices"][0] for answer in answers]


def test_wait_lets_running_requests_end_with_the_version_they_began_with(fleet: Fleet) -> None:
    before = fleet.version()
    for choice in asyncio.run(running_during_a_round(fleet, 31, InFlight.WAIT)):
        assert choice["weight_versions"] == [{"version": before, "start": 0, "end": 300}]
    with fleet.client() as client:
        assert complete(client).version == before + 1


def test_abort_ends_running_requests_with_what_they_have(fleet: Fleet) -> None:
    before = fleet.version()
    choices = asyncio.run(running_during_a_round(fleet, 32, InFlight.ABORT))
    aborted = [choice for choice in choices if choice["finish_reason"] == "abort"]
    assert aborted, "eight requests of 300 tokens were running"
    for choice in aborted:
        spans = choice["weight_versions"]
        assert isinstance(spans, list) and all(span["version"] == before for span in spans)
        assert len(choice["token_ids"]) < 300  # type: ignore[arg-type]
    with fleet.client() as client:
        assert complete(client).version == before + 1
