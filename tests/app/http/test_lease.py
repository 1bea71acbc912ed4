"""The lease of callers who carry none, over a complete update and when a call fails."""

import httpx
import pytest

from app.http.weight_routes import PUBLISHER
from deployments.protocol.errors import InvalidRequest, RoundAborted, TransferAborted
from deployments.protocol.publishing import RoundOptions
from tests.app.http.fake_controller import FakeController


async def test_complete_update_acquires_the_lease_once_and_releases_it(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    answers = [
        await fleet.post("/init_weight_transfer_engine", json={"init_info": {"port": 1}}),
        await fleet.post("/start_weight_update"),
        await fleet.post("/update_weights", json={"update_info": {"segment": "a"}}),
        await fleet.post("/update_weights", json={"update_info": [{"segment": "b"}, {"segment": "c"}]}),
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
    assert controller.sent == [{"segment": "a"}, [{"segment": "b"}, {"segment": "c"}]]
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
        await controller.open_round(lease.token, RoundOptions())
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 409
    assert answer.json()["error"] == {
        "type": "conflict",
        "message": "'trainer' publishes",
        "detail": {"holder": "trainer"},
    }
    assert controller.lease == lease, "the other publisher still holds it"
    assert (controller.round_id is not None) == round_open


async def test_lease_is_held_between_calls_only_while_a_round_is_open(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/init_weight_transfer_engine", json={"init_info": {}})
    assert controller.lease is None
    await fleet.post("/start_weight_update")
    held = controller.lease
    assert held is not None and held.publisher == PUBLISHER
    await fleet.post("/update_weights", json={"update_info": {}})
    assert controller.lease == held, "renewed, not acquired again: that would abort the round"
    await fleet.post("/finish_weight_update")
    assert controller.lease is None


async def test_call_refused_by_an_open_round_does_not_renew_its_lease(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update")
    renewed = controller.renewals
    for path in ("/init_weight_transfer_engine", "/start_weight_update", "/shutdown_weight_transfer_engine"):
        answer = await fleet.post(path, json={"init_info": {}} if "init" in path else None)
        assert answer.status_code == 409
        assert "round 1 is open: finish it, or wait 60 s" in answer.json()["error"]["message"]
    assert controller.renewals == renewed
    await fleet.post("/update_weights", json={"update_info": {}})
    assert controller.renewals == renewed + 2, "when it comes and when it is done"


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
    controller.fail_next["close_round"] = RoundAborted("too few replicas staged")
    answer = await fleet.post("/finish_weight_update")
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "round_aborted")
    assert controller.lease is None
    assert (await fleet.post("/start_weight_update")).status_code == 200


async def test_payload_that_is_rejected_leaves_the_round_and_its_lease(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update")
    controller.fail_next["send"] = InvalidRequest("expected shape [3], got [4]")
    assert (await fleet.post("/update_weights", json={"update_info": {}})).status_code == 400
    assert controller.lease is not None and controller.round_id == 1
    assert (await fleet.post("/finish_weight_update")).status_code == 200


async def test_transfer_that_failed_is_to_be_sent_again_from_its_beginning(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update")
    controller.fail_next["send"] = TransferAborted("a peer is gone", {"send_again": True})
    answer = await fleet.post("/update_weights", json={"update_info": {}})
    assert answer.status_code == 409 and "retry-after" not in answer.headers
    assert answer.json()["error"]["detail"] == {"send_again": True}
