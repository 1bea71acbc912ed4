import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from ray import serve
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from app.client.completions import Answer
from deployments.calls.rpc import CallHandle, run_sync
from deployments.protocol.engine_state import InFlight
from deployments.protocol.poll import KvCache
from deployments.protocol.publishing import RoundOptions, RoundReport
from deployments.trainer.fleet_connection import FleetWeightSyncClient
from deployments.vllm_plugin import register
from deployments.weights.transports.shm import ShmTrainerInitInfo
from tests.fleet.deployed import Fleet
from tests.fleet.talk import begun, body, complete
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(300)]
register()
ATTEMPTS = range(32, 37)  # seeds; on a busy host the requests may end before the round meets them


def publisher(fleet: Fleet, seed: int, in_flight: InFlight, **settings: Any) -> Callable[[], RoundReport]:
    """A publisher that is connected: what it still does takes a fraction of a second under load."""
    controller = CallHandle(serve.get_deployment_handle("controller", app_name=fleet.application))
    # It writes no versions itself; a replica that starts later would wait for them.
    client = FleetWeightSyncClient(controller, "test", RoundOptions(persist=True))
    engine = WeightTransferTrainerFactory.trainer_init(
        ShmTrainerInitInfo(rank=0), client=client, source=ModuleSource(tiny_llama(seed))
    )

    async def configure(**live: Any) -> None:
        await controller.reconfigure.remote(live)

    def send() -> RoundReport:
        run_sync(configure(in_flight=in_flight, **settings))
        try:
            engine.send_weights()
        finally:
            run_sync(configure())
        assert client.report is not None
        return client.report

    return send


def publish(fleet: Fleet, seed: int, in_flight: InFlight, **settings: Any) -> RoundReport:
    return publisher(fleet, seed, in_flight, **settings)()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(reached):
            await asyncio.sleep(0.05)


async def running_answers(client: httpx.AsyncClient, count: int, tokens: int) -> list["asyncio.Task[Answer]"]:
    """Streams of so many tokens, each of which has begun."""
    return await asyncio.gather(*(begun(client, [60 + index, 4], tokens) for index in range(count)))


async def running_during_a_round(fleet: Fleet, seed: int, in_flight: InFlight) -> list[Answer]:
    send = await asyncio.to_thread(publisher, fleet, seed, in_flight)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=200) as client:
        running = await running_answers(client, 16, 900)
        await asyncio.to_thread(send)
        return await asyncio.gather(*running)


def test_abort_ends_running_requests_with_what_they_have(fleet: Fleet) -> None:
    for seed in ATTEMPTS:
        before = fleet.version()
        answers = asyncio.run(running_during_a_round(fleet, seed, InFlight.ABORT))
        if aborted := [answer for answer in answers if answer.aborted]:
            break
    assert aborted, "sixteen requests of 900 tokens were running"
    for answer in aborted:
        assert answer.weight_versions and {span.version for span in answer.weight_versions} == {before}
        assert len(answer.token_ids) < 900
    with fleet.client() as client:
        assert complete(client).version == before + 1


SHARED = list(range(10, 10 + 64))  # four blocks that all requests begin with


async def keep_rounds_under_one_prefix(fleet: Fleet, seeds: list[int]) -> list[dict[str, Any]]:
    """Short requests with one prefix, while rounds replace the weights under longer ones with the same."""
    ended = asyncio.Event()
    choices: list[dict[str, Any]] = []

    async def ask_on(client: httpx.AsyncClient, last: int, count: int) -> None:
        while not ended.is_set():
            answer = await client.post("/v1/completions", json=body([*SHARED, last], count))
            assert answer.status_code == 200, answer.text
            choices.append({"last": last, **answer.json()["choices"][0]})

    def is_answered(version: int) -> bool:
        """Whether a short answer is of this version alone."""
        return any(each["last"] < 120 and versions_of(each) == {version} for each in choices)

    async with httpx.AsyncClient(base_url=fleet.url, timeout=200) as client:
        asking = [asyncio.create_task(ask_on(client, 100 + index, 4)) for index in range(6)]
        asking += [asyncio.create_task(ask_on(client, 120 + index, 200)) for index in range(4)]
        version = fleet.version()
        for seed in seeds:
            await until(lambda version=version: is_answered(version))
            await asyncio.to_thread(publish, fleet, seed, InFlight.KEEP, kv_cache=KvCache.KEEP)
            version += 1
        await until(lambda: is_answered(version))
        ended.set()
        await asyncio.gather(*asking)
    return choices


def versions_of(choice: dict[str, Any]) -> set[int]:
    return {span["version"] for span in choice["weight_versions"]}


def test_an_answer_of_one_version_owes_nothing_to_another_though_caches_are_kept(fleet: Fleet) -> None:
    before, seeds = fleet.version(), [51, 52, 53]
    choices = asyncio.run(keep_rounds_under_one_prefix(fleet, seeds))
    models = {before + 1 + index: tiny_llama(seed) for index, seed in enumerate(seeds)}
    compared = set()
    for choice in choices:
        versions = versions_of(choice)
        if len(versions) == 1 and (version := versions.pop()) in models and choice["last"] < 120:
            prompt = torch.tensor([[*SHARED, choice["last"]]])
            expected = models[version].generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=4,
                min_new_tokens=4,
                do_sample=False,
                eos_token_id=None,
            )[0, prompt.shape[1] :]
            assert choice["token_ids"] == expected.tolist(), f"version {version}"
            compared.add(version)
    assert compared == set(models), "each version answered something alone"
