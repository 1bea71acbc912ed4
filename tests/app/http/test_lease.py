"""The lease of callers who carry none: a complete update, a call that fails, a controller that is gone.

`tests/deployments/calls/test_publish_session.py` has when it is renewed, and what a lost controller costs.
"""

from collections.abc import Iterator

import httpx
import pytest
import requests
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from deployments.protocol import errors
from deployments.protocol.publishing import RoundOptions
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import application, on_a_socket

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
    controller.fail_next[method] = errors.InvalidRequest(
        "expected 3 ranks, got 7", {"expected": 3, "actual": 7}
    )
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["detail"] == {"expected": 3, "actual": 7}
    assert controller.lease is None


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
    controller.fail_next["send"] = errors.InvalidRequest("expected shape [3], got [4]")
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


# What clients repeat by themselves: a POST on 500, 502 and 503, as TRL's session does.


REPEATED = (500, 502, 503)


@pytest.fixture
def address(controller: FakeController) -> Iterator[str]:
    with on_a_socket(application(controller)) as place:
        yield f"http://{place}"


def session_of_trl() -> requests.Session:
    retry = Retry(total=5, status=3, status_forcelist=REPEATED, allowed_methods=["POST", "GET"])
    session = requests.Session()
    session.mount("http://", HTTPAdapter(max_retries=retry))
    return session


UNREACHABLE = errors.FleetUnavailable("cannot be reached", {"restarting": True, "unreachable": True})
FAILED_FOR_GOOD = [
    errors.RoundAborted("the fleet still serves the old version"),
    errors.TransferAborted("a peer is gone", {"send_again": True}),
    errors.StalePublisher("token 1 is stale"),
    errors.Conflict("a round is open"),
    UNREACHABLE,
    ValueError("a fault of our own"),
]


@pytest.mark.parametrize("error", FAILED_FOR_GOOD, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("route", ["/pause", "/update_weights"])
def test_call_that_failed_for_good_is_not_repeated(
    address: str, controller: FakeController, route: str, error: Exception
) -> None:
    session = session_of_trl()
    if route == "/update_weights":
        session.post(f"{address}/start_weight_update")
    method = "call" if route == "/pause" else "send"
    controller.fail_next[method] = error
    answer = session.post(f"{address}{route}", json={"update_info": {}})
    assert answer.status_code == 409 and "retry-after" not in answer.headers
    assert controller.calls.count(method) == 1


@pytest.mark.slow
def test_retryable_error_is_503_with_retry_after(address: str, controller: FakeController) -> None:
    controller.fail_next["call"] = errors.FleetUnavailable("too few replicas")
    once = requests.post(f"{address}/pause")
    assert once.status_code == 503 and once.headers["retry-after"] == "1"
    controller.fail_next["call"] = errors.FleetUnavailable("too few replicas")
    assert session_of_trl().post(f"{address}/pause").json() == {"status": "paused"}
    assert controller.calls.count("call") == 3


@pytest.mark.slow
def test_lost_read_may_be_repeated(address: str, controller: FakeController) -> None:
    controller.fail_next["fleet"] = UNREACHABLE
    assert session_of_trl().get(f"{address}/fleet").status_code == 200
    assert controller.calls.count("fleet") == 2


def test_no_error_of_ours_but_those_that_may_be_sent_again_is_repeated() -> None:
    kinds = {
        kind.__name__: kind.status
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.SlipstreamError)
        and kind is not errors.SlipstreamError
    }
    again = {name for name, status in kinds.items() if status >= 500}
    assert again == {"ReplicaUnavailable", "FleetUnavailable"}
    assert all(kinds[name] == 503 for name in again)
