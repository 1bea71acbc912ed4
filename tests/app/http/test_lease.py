"""The lease of callers who carry none: a complete update, a call that fails, a controller that is gone.

`tests/deployments/calls/test_publish_session.py` has when it is renewed, and what a lost controller costs.
"""

import httpx
import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.protocol.errors import InvalidRequest
from deployments.protocol.publishing import RoundOptions
from tests.app.http.fake_controller import FakeController

PARTS = [{"segment": each} for each in "bcde"]  # one for each worker


async def test_complete_update_acquires_the_lease_once_and_releases_it(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    answers = [
        await fleet.post("/init_weight_transfer_engine", json={"init_info": {"port": 1}}),
        await fleet.post("/start_weight_update"),
        await fleet.post("/update_weights", json={"update_info": {"segment": "a"}}),
        await fleet.post("/update_weights", json={"update_info": PARTS}),
        await fleet.post("/finish_weight_update", json={"weight_version": "step-1"}),
        await fleet.post("/shutdown_weight_transfer_engine"),
    ]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert [answer.json()["message"] for answer in answers] == [
        "Weight transfer initialized",
        "Weight update started",
        "Weights updated",
        "Weights updated",
        "Weight update finished",
        "Weight transfer shut down",
    ]
    assert controller.sent == [{"segment": "a"}, PARTS]
    assert controller.options == [RoundOptions(persist=True)], "nobody else stores an outside version"
    assert (controller.version, controller.label) == (4, "step-1")
    assert controller.lease is None


@pytest.mark.parametrize(
    ("path", "body", "round_open"),
    [
        ("/init_weight_transfer_engine", {"init_info": {}}, False),
        ("/start_weight_update", None, False),
        ("/update_weights", {"update_info": {}}, True),
        ("/finish_weight_update", None, True),
        ("/shutdown_weight_transfer_engine", None, False),
    ],
)
async def test_each_call_is_refused_while_another_publisher_holds_the_lease(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, body: object, round_open: bool
) -> None:
    lease = await controller.acquire("trainer")
    if round_open:
        await controller.connect(lease.token, {})
        await controller.open_round(lease.token, RoundOptions())
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert error["type"] == "conflict" and error["message"].startswith("'trainer' publishes")
    assert error["detail"]["holder"] == "trainer"
    assert controller.lease == lease, "the other publisher still holds it"
    assert (controller.round_id is not None) == round_open


@pytest.mark.parametrize(
    ("path", "method", "body"),
    [
        ("/init_weight_transfer_engine", "connect", {"init_info": {}}),
        ("/start_weight_update", "open_round", None),
        ("/shutdown_weight_transfer_engine", "disconnect", None),
    ],
)
async def test_call_that_fails_releases_the_lease(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, method: str, body: object
) -> None:
    controller.fail_next[method] = InvalidRequest("expected 3 ranks, got 7", {"expected": 3, "actual": 7})
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["detail"] == {"expected": 3, "actual": 7}
    assert controller.lease is None and controller.calls[-1] == "leave_lease"


async def test_round_that_aborts_releases_the_lease(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update")
    answer = await fleet.post("/finish_weight_update")  # nothing was sent
    assert answer.status_code == 400 and "every replica rejected verify" in answer.text
    assert controller.lease is None
    assert (await fleet.post("/start_weight_update")).status_code == 200


async def test_payload_that_is_rejected_leaves_the_round_and_its_lease(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update")
    controller.fail_next["send"] = InvalidRequest("expected shape [3], got [4]")
    assert (await fleet.post("/update_weights", json={"update_info": {}})).status_code == 400
    assert controller.lease is not None and controller.round_id == 4
    await fleet.post("/update_weights", json={"update_info": {}})
    assert (await fleet.post("/finish_weight_update")).status_code == 200


async def test_repeated_finish_reports_the_outcome_of_the_first(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/init_weight_transfer_engine", json={"init_info": {}})
    await fleet.post("/start_weight_update")
    await fleet.post("/update_weights", json={"update_info": {}})
    assert (await fleet.post("/finish_weight_update")).status_code == 200
    answer = await fleet.post("/finish_weight_update")
    assert answer.status_code == 409
    assert "the last one, round 4, is committed as version 4" in answer.json()["error"]["message"]


@pytest.mark.parametrize("error", [ActorDiedError(), DeploymentUnavailableError("controller")])
async def test_call_that_was_not_sent_may_be_repeated(
    fleet: httpx.AsyncClient, controller: FakeController, error: Exception
) -> None:
    controller.fail_next["call"] = error
    answer = await fleet.post("/pause")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "fleet_unavailable")
    assert answer.headers["retry-after"] == "1"
