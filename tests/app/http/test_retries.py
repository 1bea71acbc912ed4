"""What clients repeat by themselves: a POST on 500, 502 and 503, as TRL's session does."""

from collections.abc import Iterator

import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from deployments.protocol import errors
from deployments.protocol.errors import (
    Conflict,
    FleetUnavailable,
    RoundAborted,
    SlipstreamError,
    StalePublisher,
    TransferAborted,
)
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import application, on_a_socket

REPEATED = (500, 502, 503)


@pytest.fixture
def fleet(controller: FakeController) -> Iterator[str]:
    with on_a_socket(application(controller)) as address:
        yield f"http://{address}"


def session_of_trl() -> requests.Session:
    retry = Retry(total=5, status=3, status_forcelist=REPEATED, allowed_methods=["POST", "GET"])
    session = requests.Session()
    session.mount("http://", HTTPAdapter(max_retries=retry))
    return session


UNREACHABLE = FleetUnavailable("cannot be reached", {"restarting": True, "unreachable": True})
FAILED_FOR_GOOD = [
    RoundAborted("the fleet still serves the old version"),
    TransferAborted("a peer is gone", {"send_again": True}),
    StalePublisher("token 1 is stale"),
    Conflict("a round is open"),
    UNREACHABLE,
    ValueError("a fault of our own"),
]


@pytest.mark.parametrize("error", FAILED_FOR_GOOD, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("route", ["/pause", "/update_weights"])
def test_call_that_failed_for_good_is_not_repeated(
    fleet: str, controller: FakeController, route: str, error: Exception
) -> None:
    session = session_of_trl()
    if route == "/update_weights":
        session.post(f"{fleet}/start_weight_update")
    method = "call" if route == "/pause" else "send"
    controller.fail_next[method] = error
    answer = session.post(f"{fleet}{route}", json={"update_info": {}})
    assert answer.status_code == 409 and "retry-after" not in answer.headers
    assert controller.calls.count(method) == 1


@pytest.mark.slow
def test_retryable_error_is_503_with_retry_after(fleet: str, controller: FakeController) -> None:
    controller.fail_next["call"] = FleetUnavailable("too few replicas")
    once = requests.post(f"{fleet}/pause")
    assert once.status_code == 503 and once.headers["retry-after"] == "1"
    controller.fail_next["call"] = FleetUnavailable("too few replicas")
    assert session_of_trl().post(f"{fleet}/pause").json() == {"status": "paused"}
    assert controller.calls.count("call") == 3


@pytest.mark.slow
def test_lost_read_may_be_repeated(fleet: str, controller: FakeController) -> None:
    controller.fail_next["fleet"] = UNREACHABLE
    assert session_of_trl().get(f"{fleet}/fleet").status_code == 200
    assert controller.calls.count("fleet") == 2


def test_no_error_of_ours_but_those_that_may_be_sent_again_is_repeated() -> None:
    kinds = {
        kind.__name__: kind.status
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, SlipstreamError) and kind is not SlipstreamError
    }
    again = {name for name, status in kinds.items() if status >= 500}
    assert again == {"ReplicaUnavailable", "FleetUnavailable"}
    assert all(kinds[name] == 503 for name in again)
