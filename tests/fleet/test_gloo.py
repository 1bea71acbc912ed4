import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import requests
from ray import serve
from ray.serve.handle import DeploymentHandle
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferTrainerFactory,
)

from deployments.protocol.errors import Conflict
from deployments.protocol.responses import AdapterReport
from deployments.trainer.fleet_connection import free_port
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.trainer import Trainer
from deployments.vllm_plugin import register
from deployments.weights.transports.gloo import GlooTrainerInitInfo
from tests.deployments.weights.transports.transport_fleet import ListSource
from tests.fleet import talk
from tests.fleet.adapter_fleet import RANKS, TRANSPORT, Adapted
from tests.fleet.adapter_talk import COUNT, Merged, entries, everywhere, tokens
from tests.fleet.deployed import Fleet
from tests.fleet.losing import (
    a_replica,
    kill_with_workers,
    members,
    wait_for_another,
)
from tests.fleet.processes import engine_of, names_of, wait_until_gone
from tests.fleet.talk import PROMPT, sampled
from tests.fleet.test_http_publisher import reference
from tests.tiny_models import tiny_llama
from trainers.settings import LoraConfig, OptimizerConfig, TrainerConfig
from trainers.trajectory import VersionSpan

APPLICATION = "adapting"
CALL_S = 120.0
LORA = LoraConfig(name="trained", rank=4, alpha=16.0)
LEARNING_RATE = 0.05  # a step changes the answers, or at least their log-probabilities


class AdapterTrainer:
    """Calls of a second trainer, as the routes make them: an application of its own, which publishes an
    adapter to the fleet's controller."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def step(self, client: httpx.Client) -> int:
        """One step on the fleet's answers; how many there have been."""
        answers = [
            sampled(client, index).trajectory(PROMPT, 1.0 if index % 2 else -1.0) for index in range(4)
        ]
        return int(self._call("step", [asdict(answer) for answer in answers])["step"])

    def publish(self, label: str | None = None) -> AdapterReport:
        report: AdapterReport = self._call("publish", label)
        return report

    def save(self, path: Path) -> Path:
        return Path(self._call("save", str(path)).path)

    def _call(self, method: str, *args: Any) -> Any:
        return getattr(self._handle, method).remote(*args).result(timeout_s=CALL_S)


@contextmanager
def adapter_trainer(adapted: Adapted) -> Iterator[AdapterTrainer]:
    spec = TrainerSpec(
        config=TrainerConfig(optimizer=OptimizerConfig(learning_rate=LEARNING_RATE), lora=LORA),
        model=str(adapted.fleet.checkpoint),
        device="cpu",
        store_dir=str(adapted.fleet.store),
        transport=TRANSPORT,
        chunk_bytes=1 << 20,
        native=False,
    )
    trainer = serve.deployment(
        Trainer,
        name="trainer",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100,
        health_check_period_s=1.0,
    ).bind(spec, serve.get_deployment_handle("controller", adapted.fleet.application))
    handle = serve.run(trainer, name=APPLICATION, route_prefix=None)
    try:
        yield AdapterTrainer(handle)
    finally:
        serve.delete(APPLICATION)


AT_ONCE_S = 45.0  # not the minute after which the group gives a peer up
register()
pytestmark = [pytest.mark.serve, pytest.mark.fleet("gloo"), pytest.mark.timeout(600)]


def test_a_round_of_two_ranks_reaches_replicas_that_have_ranks_of_their_own(gloo: Fleet) -> None:
    with gloo.client() as client:
        status = client.get("/train/status").json()
        assert status["strategy"] == "fsdp2" and status["world_size"] == RANKS
        before = talk.complete(client, max_tokens=24).token_ids
        for _ in range(3):
            version = talk.train_and_publish(client)
        expected = talk.Reference(talk.served_checkpoint(gloo))(talk.PROMPT, 24)
        assert expected != before
        for answer in talk.on_every_replica(client, max_tokens=24).values():
            assert answer.token_ids == expected
            assert answer.weight_versions == [VersionSpan(version=version, start=0, end=24)]
        last = client.get("/fleet/rounds").json()["rounds"][-1]
        assert len(last["replicas"]) == 2 and not last["fenced"]


def killing_source(seed: int, engine: psutil.Process, pause_s: float) -> ListSource:
    """It kills a replica's engine in the middle of the tensors, and continues after a while."""

    def before(index: int) -> None:
        if index == 8:
            kill_with_workers(engine)
            time.sleep(pause_s)

    return ListSource(list(tiny_llama(seed).named_parameters()), before=before)


# The publisher notices first, whose next chunk a closed connection does not take; or the fleet does, while
# the other replica waits for that chunk.
@pytest.mark.parametrize("pause_s", [0.5, pytest.param(6.0, marks=pytest.mark.long)])
def test_a_replica_that_dies_under_a_broadcast_is_replaced_by_one_that_has_the_version_and_the_adapters(
    adapted: Adapted, client: httpx.Client, tmp_path: Path, pause_s: float
) -> None:
    """The publisher is told to send again."""
    gloo = adapted.fleet
    with adapter_trainer(adapted) as trainer:
        adapter = publish_adapter(client, trainer, tmp_path / "adapter")
        expected = Merged(talk.served_checkpoint(gloo), adapter)(talk.PROMPT, COUNT)
        assert [tokens(answer) for answer in everywhere(client, LORA.name)] == [expected] * 2
        before, victim = members(client), a_replica(gloo)
        names = names_of(victim)
        assert len(names) > 1, "its owner's, and the engine's sockets"
        send_while_an_engine_dies(gloo, client, engine_of(victim), pause_s)
        wait_for_another(client, before)
        wait_until_gone(names)
        assert len(names_of(a_replica(gloo))) > 1, "a living replica keeps its names"
        for answer in talk.on_every_replica(client).values():
            assert (answer.version, answer.token_ids) == (gloo.version(), reference(21, talk.PROMPT, 16))
        expected = Merged(talk.served_checkpoint(gloo), adapter)(talk.PROMPT, COUNT)
        assert [tokens(answer) for answer in everywhere(client, LORA.name)] == [expected] * 2
        trainer.step(client)
        with pytest.raises(Conflict, match="was trained on version"):
            trainer.publish()
        assert talk.train_and_publish(client) == gloo.version(), "to the fleet as it is now"


def publish_adapter(client: httpx.Client, trainer: AdapterTrainer, directory: Path) -> Path:
    """Two publishes; the adapter as the trainer has it."""
    for number in range(2):
        trainer.step(client)
        report = trainer.publish(f"step {number}")
        assert (report.name, report.label) == (LORA.name, f"step {number}")
        [status] = [each for each in entries(client) if each["digest"] == report.digest]
        assert len(status["replicas"]) == 2
    return trainer.save(directory)


def send_while_an_engine_dies(
    fleet: Fleet, client: httpx.Client, engine: psutil.Process, pause_s: float
) -> None:
    """The first attempt of an outside publisher is aborted; the second one reaches who serves then."""
    version = fleet.version()
    begin = time.monotonic()
    with pytest.raises(requests.HTTPError) as caught:
        outside(fleet, killing_source(21, engine, pause_s)).send_weights()
    response = caught.value.response
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (409, "round_aborted")
    assert error["detail"]["send_again"] is True and "send the round again" in error["message"]
    assert fleet.version() == version and talk.complete(client).version == version
    outside(fleet, ModuleSource(tiny_llama(21))).send_weights()
    assert time.monotonic() - begin < AT_ONCE_S, "no peer waits for the dead replica"
    assert talk.complete(client).version == version + 1


def outside(fleet: Fleet, source: WeightSource, again: bool = True) -> TrainerWeightTransferEngine[Any]:
    """An outside publisher that is connected with all workers that the fleet has now."""
    client = HTTPVLLMWeightSyncClient(fleet.url, timeout=60)
    info = GlooTrainerInitInfo(
        rank=0,
        master_address="127.0.0.1",
        master_port=free_port(),
        world_size=1 + httpx.get(f"{fleet.url}/get_world_size").json()["world_size"],
        chunk_bytes=1 << 16,
    )
    try:
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    except requests.HTTPError as error:
        if not again or error.response is None or error.response.status_code != 400:
            raise
        return outside(fleet, source, again=False)  # a successor has joined since the fleet was asked
