"""A second fleet in the same cluster, with the other settings: gloo, rolling commits, kept caches."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import torch
from ray import serve
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferTrainerFactory,
)

from app.client.completions import Answer
from deployments.trainer.addresses import free_port
from deployments.vllm_plugin import register
from deployments.weights.transports.gloo import GlooTrainerInitInfo
from tests.fleet.losing import (
    a_replica,
    a_round_that_hangs,
    engine_of,
    kill_with_workers,
    members,
    wait_for_another,
)
from tests.fleet.session_fleet import MODEL, PORT, Fleet
from tests.fleet.talk import PROMPT, Reference, ask, complete, on_every_replica, train_and_publish
from tests.tiny_models import tiny_llama
from trainers.trajectory import VersionSpan

AT_ONCE_S = 20.0  # not the minute after which the group gives a peer up
register()
pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def gloo(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("gloo")
    from app.main import build
    from app.settings.config import parse_config

    config = parse_config(
        {
            "model": str(fleet.checkpoint),
            "served_model_name": MODEL,
            "state_dir": str(root / "state"),
            "engine": {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "num_replicas": 2},
            "weights": {
                "transport": "gloo",
                "commit": "rolling",
                "kv_cache": "keep",
                "chunk_bytes": 1 << 18,
                "lease_s": 30,
                "heartbeat_timeout_s": 20,
            },
            "trainer": {"optimizer": {"learning_rate": 0.02}},
        }
    )
    serve.run(build(config), name="gloo", route_prefix="/gloo")
    try:
        yield Fleet(
            url=f"http://127.0.0.1:{PORT}/gloo", checkpoint=fleet.checkpoint, store=root / "state" / "store"
        )
    finally:
        serve.delete("gloo")


def test_a_round_over_gloo_reaches_replicas_that_have_ranks_of_their_own(gloo: Fleet, tmp_path: Path) -> None:
    with gloo.client() as client:
        before = complete(client, max_tokens=24).token_ids
        for _ in range(3):
            version = train_and_publish(client)
        saved = client.post("/train/save", json={"path": str(tmp_path / "saved")}).json()["path"]
        expected = Reference(Path(saved))(PROMPT, 24)
        assert expected != before
        for answer in on_every_replica(client, max_tokens=24).values():
            assert answer.token_ids == expected
            assert answer.weight_versions == [VersionSpan(version=version, start=0, end=24)]
        last = client.get("/fleet/rounds").json()["rounds"][-1]
        assert len(last["replicas"]) == 2 and not last["fenced"]


def test_requests_with_kept_caches_go_on_across_rounds(gloo: Fleet) -> None:
    async def scenario() -> list[Answer]:
        async with httpx.AsyncClient(base_url=gloo.url, timeout=300) as client:

            def publish() -> None:
                with gloo.client() as trainer:
                    for _ in range(3):
                        train_and_publish(trainer)

            rounds = asyncio.create_task(asyncio.to_thread(publish))

            async def keep_asking(index: int) -> list[Answer]:
                """One request after another, so that some are running whenever a round comes."""
                answers = []
                while not rounds.done():
                    answers.append(await ask(client, [20 + index, 3], 200, stream=index % 2 == 0))
                return answers

            answers = await asyncio.gather(*(keep_asking(index) for index in range(24)))
            await rounds
            return [answer for some in answers for answer in some]

    answers = asyncio.run(scenario())
    assert all(len(answer.token_ids) == 200 and answer.weight_versions[-1].end == 200 for answer in answers)
    assert any(len(answer.weight_versions) > 1 for answer in answers)
    for answer in answers:
        versions = [span.version for span in answer.weight_versions]
        assert versions == sorted(set(versions))


def test_a_prefix_of_an_older_version_is_never_reused(gloo: Fleet, tmp_path: Path) -> None:
    """With kept caches a running request's blocks are of two versions; later requests must not hit them."""
    prompt = list(range(30, 130))  # several blocks, so that there is a prefix to hit
    with gloo.client() as client:
        on_every_replica(client, prompt=prompt, max_tokens=8)
        train_and_publish(client)
        saved = client.post("/train/save", json={"path": str(tmp_path / "saved")}).json()["path"]
        expected = Reference(Path(saved))(prompt, 16)
        for answer in on_every_replica(client, prompt=prompt, max_tokens=16).values():
            assert answer.token_ids == expected


def test_a_transfer_group_of_the_wrong_size_is_refused_with_the_numbers(gloo: Fleet) -> None:
    """A meeting of seven cannot happen with two replicas: refused, before anybody waits for it."""
    client = HTTPVLLMWeightSyncClient(gloo.url, timeout=60)
    info = {"master_address": "127.0.0.1", "master_port": 29777, "rank_offset": 1, "world_size": 7}
    version = gloo.version()
    begin = time.monotonic()
    with pytest.raises(requests.HTTPError) as caught:
        client.init_weight_transfer_engine(info)
    assert time.monotonic() - begin < 10
    assert caught.value.response.status_code == 400
    error = caught.value.response.json()["error"]
    assert error["detail"] == {"expected": 3, "actual": 7, "workers": 2}
    with gloo.client() as http:
        assert train_and_publish(http) == version + 1


@pytest.mark.chaos
def test_a_round_in_which_a_replica_dies_reaches_the_others_at_once(gloo: Fleet) -> None:
    with gloo.client() as client:
        version, serving = train_and_publish(client), members(client)
        engine = engine_of(a_replica("gloo"))
        with a_round_that_hangs(gloo, engine) as answers:
            engine.kill()
            killed = time.monotonic()
        assert time.monotonic() - killed < AT_ONCE_S
        assert answers[0].status_code == 200, answers[0].text
        assert answers[0].json()["version"] == version + 1
        survivor = complete(client)
        assert survivor.version == version + 1 and survivor.replica in serving
        wait_for_another(client, serving)
        for answer in on_every_replica(client).values():
            assert (answer.version, answer.token_ids) == (version + 1, survivor.token_ids)
        assert train_and_publish(client) == version + 2, "and the next round reaches both"


@pytest.mark.chaos
def test_a_replica_that_dies_before_it_has_connected_holds_nobody_up(gloo: Fleet) -> None:
    with gloo.client() as http, ThreadPoolExecutor(max_workers=1) as calls:
        version, serving = train_and_publish(http), members(http)
        engine = engine_of(a_replica("gloo"))
        engine.suspend()
        connecting = calls.submit(outside, gloo, ModuleSource(tiny_llama(22)), workers=2)
        time.sleep(2.0)
        assert not connecting.done(), "the members of a group wait for each other"
        engine.kill()
        killed = time.monotonic()
        with pytest.raises(requests.HTTPError) as caught:
            connecting.result()
        error = caught.value.response.json()["error"]
        assert caught.value.response.status_code == 409 and error["detail"]["connect_again"] is True
        outside(gloo, ModuleSource(tiny_llama(22)), workers=1).send_weights()
        assert time.monotonic() - killed < AT_ONCE_S
        survivor = complete(http)
        assert survivor.version == version + 1 and survivor.replica in serving
        wait_for_another(http, serving)
        for answer in on_every_replica(http).values():
            assert (answer.version, answer.token_ids) == (version + 1, survivor.token_ids)


class KillingSource(ModuleSource):
    """Kills a replica's engine in the middle of the tensors, and goes on after a while."""

    def __init__(self, seed: int, pause_s: float) -> None:
        super().__init__(tiny_llama(seed))
        self._pause_s = pause_s

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(super().__iter__()):
            if index == 8:
                kill_with_workers(engine_of(a_replica("gloo")))
                time.sleep(self._pause_s)
            yield pair


# The publisher notices first, whose next chunk a closed connection does not take; or the fleet does, while
# the other replica waits for that chunk.
@pytest.mark.chaos
@pytest.mark.parametrize("pause_s", [0.5, pytest.param(6.0, marks=pytest.mark.long)])
def test_an_outside_publisher_is_told_to_send_again_when_a_replica_dies_under_its_broadcast(
    gloo: Fleet, pause_s: float
) -> None:
    with gloo.client() as http:
        version, serving = gloo.version(), members(http)
        begin = time.monotonic()
        with pytest.raises(requests.HTTPError) as caught:
            outside(gloo, KillingSource(21, pause_s), workers=2).send_weights()
        assert time.monotonic() - begin < AT_ONCE_S
        response = caught.value.response
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (409, "round_aborted")
        assert error["detail"]["send_again"] is True and "send the round again" in error["message"]
        assert gloo.version() == version and complete(http).version == version
        begin = time.monotonic()
        outside(gloo, ModuleSource(tiny_llama(21)), workers=1).send_weights()
        assert time.monotonic() - begin < AT_ONCE_S, "the other replica waits no longer for the first attempt"
        survivor = complete(http)
        assert survivor.version == version + 1 and survivor.replica in serving
        wait_for_another(http, serving)
        for answer in on_every_replica(http).values():
            assert (answer.version, answer.token_ids) == (version + 1, survivor.token_ids)


def outside(fleet: Fleet, source: WeightSource, workers: int) -> TrainerWeightTransferEngine[Any]:
    info = GlooTrainerInitInfo(
        rank=0,
        master_address="127.0.0.1",
        master_port=free_port(),
        world_size=1 + workers,
        chunk_bytes=1 << 16,
    )
    client = HTTPVLLMWeightSyncClient(fleet.url, timeout=60)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
