import json
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from app.client import calls
from app.client.connection import AsyncFleetClient, Call, FleetError
from deployments.protocol.engine_state import InFlight, Pause
from deployments.protocol.responses import FleetStatus
from tests.app.fake_answers import client_of
from tests.app.http.fake_controller import FakeController
from tests.app.http.fake_status import report
from tests.app.http.fake_trainer import STATUS, FakeTrainer
from tests.app.http.serving import FakeRouter, client
from trainers.trajectory import Trajectory, VersionSpan
from trainers.trajectory_arrays import from_bytes

SPAN = VersionSpan(version=3, start=0, end=2)
TRAJECTORY = Trajectory(
    prompt_token_ids=(1,), token_ids=(2, 3), logprobs=(-1.0, -0.5), advantage=1.0, weight_versions=(SPAN,)
)


def fleet(controller: FakeController, trainer: FakeTrainer | None = None) -> AsyncFleetClient:
    vllm = {"data": [{"id": "tiny"}], "tokens": [5, 6]}  # /v1/models and /tokenize
    return AsyncFleetClient(client(controller, trainer=trainer, router=FakeRouter(lambda path: vllm)))


def as_json(status: FleetStatus) -> object:
    return json.loads(json.dumps(asdict(status)))  # lists in place of tuples


async def test_the_fleet_is_read_as_the_controllers_own_types() -> None:
    controller = FakeController()
    async with fleet(controller) as made:
        status = await made.send(calls.fleet())
        assert as_json(status) == as_json(await controller.fleet())
        assert status.members[0].state == "serving"
        assert await made.send(calls.rounds()) == controller.reports
        assert (await made.send(calls.health())).weight_version == 3
        assert await made.send(calls.world_size()) == 4


async def test_control_calls_reach_the_controller() -> None:
    controller = FakeController()
    async with fleet(controller) as made:
        assert (await made.send(calls.pause())).status == "paused"
        assert (await made.send(calls.pause("keep"))).status == "paused"
        assert (await made.send(calls.resume())).status == "resumed"
        await made.send(calls.disconnect())
    assert controller.operations[:2] == [Pause(mode=InFlight.ABORT), Pause(mode=InFlight.KEEP)]
    assert controller.lease is None


async def test_the_trainers_calls_are_typed() -> None:
    trainer = FakeTrainer()
    async with fleet(FakeController(), trainer) as made:
        assert await made.send(calls.step([TRAJECTORY])) == {"loss": 0.5}
        assert await made.send(calls.step([], done=2, label="step 3")) == {"loss": 0.25}
        assert await made.send(calls.publish("step 1")) == report(2, 4, "step 1")
        assert await made.send(calls.publish()) == report(2, 4)
        with pytest.raises(FleetError, match="continue from version 3"):
            await made.send(calls.publish(after=3))
        assert (await made.send(calls.rollback(2))).label == "rollback to 2"
        assert (await made.send(calls.save())).path == "/tmp/checkpoint"
        assert (await made.send(calls.save("/data/x"))).path == "/data/x"
        assert await made.send(calls.train_status()) == STATUS
    assert from_bytes(trainer.received[0]) == [TRAJECTORY]


async def test_vllms_routes_are_read_too() -> None:
    async with fleet(FakeController()) as made:
        assert await made.send(calls.model()) == "tiny"
        assert await made.send(calls.tokenize("tiny", "a b")) == [5, 6]


@pytest.mark.parametrize("call", [calls.model(), calls.tokenize("tiny", "a")])
async def test_a_response_of_another_type_is_an_error(call: Call[Any]) -> None:
    async with client_of(lambda request: httpx.Response(200, json={"data": []})) as made:
        with pytest.raises(FleetError, match="the answer cannot be read"):
            await made.send(call)
