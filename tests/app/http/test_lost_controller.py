"""What an outside publisher is told when the controller dies during its calls."""

import httpx
import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError

from tests.app.http.fake_controller import FakeController


async def sent(fleet: httpx.AsyncClient) -> None:
    await fleet.post("/init_weight_transfer_engine", json={"init_info": {}})
    await fleet.post("/start_weight_update")
    await fleet.post("/update_weights", json={"update_info": {}})


async def test_finish_succeeds_if_the_controller_dies_after_the_decision(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await sent(fleet)
    controller.dies_after = {"close_round"}
    answer = await fleet.post("/finish_weight_update", json={"weight_version": "one"})
    assert (answer.status_code, answer.json()) == (200, {"message": "Weight update finished"})
    assert (controller.version, controller.label) == (4, "one")
    assert controller.calls.count("close_round") == 2 and controller.lease is None


async def test_finish_asks_to_send_again_if_the_controller_dies_before_the_decision(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await sent(fleet)
    controller.dies_before = {"close_round"}
    answer = await fleet.post("/finish_weight_update")
    assert answer.status_code == 409, "who repeats this call alone gets nowhere"
    assert answer.json()["error"]["detail"] == {"send_again": True}
    assert controller.version == 3


@pytest.mark.parametrize(
    ("path", "method", "body"),
    [("/start_weight_update", "open_round", None), ("/update_weights", "send", {"update_info": {}})],
)
async def test_round_that_is_lost_with_the_controller_is_to_be_sent_again(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, method: str, body: object
) -> None:
    if method == "send":
        await fleet.post("/start_weight_update")
    controller.dies_after = {method}
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert (error["type"], error["detail"]) == ("round_aborted", {"send_again": True})
    late = await fleet.post("/finish_weight_update")
    assert late.status_code == 409
    assert "the last one, round 1, is aborted: the controller restarted" in late.json()["error"]["message"]
    assert controller.version == 3 and controller.lease is None


async def test_repeated_finish_reports_the_outcome_of_the_first(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await sent(fleet)
    assert (await fleet.post("/finish_weight_update")).status_code == 200
    answer = await fleet.post("/finish_weight_update")
    assert answer.status_code == 409
    assert "the last one, round 1, is committed as version 4" in answer.json()["error"]["message"]


@pytest.mark.parametrize("error", [ActorDiedError(), DeploymentUnavailableError("controller")])
async def test_call_that_was_not_sent_may_be_repeated(
    fleet: httpx.AsyncClient, controller: FakeController, error: Exception
) -> None:
    controller.fail_next["call"] = error
    answer = await fleet.post("/pause")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "fleet_unavailable")
    assert answer.headers["retry-after"] == "1"
