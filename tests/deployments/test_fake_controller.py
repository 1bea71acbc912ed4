"""The fake controller refuses what the real ledger refuses: one suite over both."""

from collections.abc import Callable
from typing import Any

import pytest

from deployments.errors import (
    Conflict,
    InvalidRequest,
    RoundAborted,
    SlipstreamError,
    StalePublisher,
    TransferAborted,
)
from deployments.protocol.publishing import RoundOptions
from deployments.protocol.status import FleetStatus
from tests.deployments.fake_controller import LEASE_S, FakeController
from tests.deployments.ledger.ledger_scene import Scene

OPTIONS = RoundOptions()


class Ledger:
    """The real ledger with a fake replica, called as the fake controller is."""

    def __init__(self) -> None:
        self.scene = Scene(replicas=1, lease_s=LEASE_S)
        self.scene.poll()

    def answer(self, method: str, *args: Any) -> Any:
        if method == "fleet":
            return self.scene.status()
        result = getattr(self.scene.ledger, method)(*args, self.scene.now)
        if not hasattr(result, "done"):
            return result
        self.scene.poll(8)
        assert result.done
        if result.error is not None:
            raise result.error
        return result.result

    def wait(self, elapsed_s: float) -> None:
        self.scene.wait(elapsed_s)

    def restart(self) -> None:
        self.scene.restart()
        self.scene.poll()

    def abort_next_round(self) -> None:
        self.scene.replicas.clear()
        self.scene.ledger.lost([("r0", "r0-1")], "its process is gone", self.scene.now)


class Fake(FakeController):
    def wait(self, elapsed_s: float) -> None:
        self.advance(self.now + elapsed_s)

    def abort_next_round(self) -> None:
        self.abort_next = RoundAborted("too few replicas remain")


Either = Ledger | Fake
Call = Callable[[int, int], tuple[Any, ...]]  # from a token and a round id: the method and its arguments

CALLS_OF_A_ROUND = pytest.mark.parametrize(
    "call",
    [
        lambda token, round_id: ("send", token, round_id, {}),
        lambda token, round_id: ("close_round", token, round_id, None),
        lambda token, round_id: ("abort_round", token, round_id, "again"),
    ],
)


@pytest.fixture(params=[Fake, Ledger])
def controller(request: pytest.FixtureRequest) -> Either:
    made: Either = request.param()
    return made


def opened(controller: Either) -> tuple[int, int]:
    """The token and the round of a publisher that has sent a payload."""
    token: int = controller.answer("acquire", "trainer").token
    controller.answer("connect", token, {})
    round_id: int = controller.answer("open_round", token, OPTIONS)
    controller.answer("send", token, round_id, {})
    return token, round_id


def refused(controller: Either, error: type[SlipstreamError], method: str, *args: Any) -> SlipstreamError:
    with pytest.raises(error) as raised:
        controller.answer(method, *args)
    assert type(raised.value) is error
    return raised.value


def test_a_round_that_is_closed_is_the_next_version_with_its_label(controller: Either) -> None:
    token, round_id = opened(controller)
    report = controller.answer("close_round", token, round_id, "step-1")
    assert (report.round_id, report.version, report.label) == (round_id, 1, "step-1")
    assert report.phase == "committed"
    controller.answer("release", token)
    fleet: FleetStatus = controller.answer("fleet")
    assert fleet.committed_version == 1
    assert fleet.connection is not None and fleet.connection.publisher == "trainer"


@pytest.mark.parametrize(
    "call",
    [
        lambda token, round_id: ("connect", token, {}),
        lambda token, round_id: ("open_round", token, OPTIONS),
        lambda token, round_id: ("send", token, round_id, {}),
        lambda token, round_id: ("abort_round", token, round_id, "reason"),
        lambda token, round_id: ("disconnect", token),
        lambda token, round_id: ("renew", token),
        lambda token, round_id: ("release", token),
    ],
)
def test_a_token_is_stale_once_its_publisher_took_a_new_lease(controller: Either, call: Call) -> None:
    token, round_id = opened(controller)
    controller.answer("acquire", "trainer")
    refused(controller, StalePublisher, *call(token, round_id))


def test_a_new_lease_ends_the_open_round_of_the_old_one(controller: Either) -> None:
    old, round_id = opened(controller)
    token = controller.answer("acquire", "trainer").token
    refused(controller, RoundAborted, "close_round", token, round_id, None)
    refused(controller, RoundAborted, "close_round", old, round_id, None)
    controller.answer("open_round", token, OPTIONS)


def test_a_release_ends_the_open_round_and_lets_others_publish(controller: Either) -> None:
    token, round_id = opened(controller)
    refused(controller, Conflict, "acquire", "other")
    controller.answer("release", token)
    refused(controller, StalePublisher, "renew", token)
    other = controller.answer("acquire", "other").token
    refused(controller, RoundAborted, "close_round", other, round_id, None)


def test_a_lease_lasts_as_long_as_it_is_renewed(controller: Either) -> None:
    token = controller.answer("acquire", "trainer").token
    for _ in range(3):
        controller.wait(LEASE_S - 1)
        controller.answer("renew", token)
    controller.wait(LEASE_S + 1)
    refused(controller, StalePublisher, "renew", token)
    controller.answer("acquire", "other")


def test_a_round_needs_a_connection_of_its_own_publisher(controller: Either) -> None:
    token = controller.answer("acquire", "trainer").token
    error = refused(controller, Conflict, "open_round", token, OPTIONS)
    assert error.detail["connect_again"] is True
    controller.answer("connect", token, {})
    controller.answer("release", token)
    other = controller.answer("acquire", "other").token
    error = refused(controller, Conflict, "open_round", other, OPTIONS)
    assert error.detail["connect_again"] is True


def test_one_round_at_a_time(controller: Either) -> None:
    token, _ = opened(controller)
    refused(controller, Conflict, "open_round", token, OPTIONS)
    refused(controller, Conflict, "connect", token, {})
    refused(controller, Conflict, "disconnect", token)


@CALLS_OF_A_ROUND
def test_a_call_to_an_aborted_round_raises_what_aborted_it(controller: Either, call: Call) -> None:
    token, round_id = opened(controller)
    controller.answer("abort_round", token, round_id, "out of memory")
    error = refused(controller, RoundAborted, *call(token, round_id))
    assert "out of memory" in error.message


@CALLS_OF_A_ROUND
def test_a_round_that_the_fleet_aborted_is_not_open(controller: Either, call: Call) -> None:
    token, round_id = opened(controller)
    controller.abort_next_round()
    refused(controller, RoundAborted, "close_round", token, round_id, None)
    refused(controller, RoundAborted, *call(token, round_id))
    assert controller.answer("fleet").committed_version == 0


@pytest.mark.parametrize("method", ["send", "abort_round"])
def test_a_call_to_a_committed_round_is_out_of_order(controller: Either, method: str) -> None:
    token, round_id = opened(controller)
    controller.answer("close_round", token, round_id, None)
    refused(controller, Conflict, method, token, round_id, {})


@pytest.mark.parametrize("restarted", [False, True])
def test_a_close_that_comes_again_is_answered_from_the_record(controller: Either, restarted: bool) -> None:
    token, round_id = opened(controller)
    report = controller.answer("close_round", token, round_id, "one")
    if restarted:
        controller.restart()
    assert controller.answer("close_round", token, round_id, "one") == report
    assert controller.answer("fleet").committed_version == 1


def test_a_restart_aborts_the_open_round_and_ends_lease_and_connection(controller: Either) -> None:
    token, round_id = opened(controller)
    controller.restart()
    error = refused(controller, TransferAborted, "close_round", token, round_id, None)
    assert error.detail == {"round_id": round_id, "send_again": True}
    refused(controller, StalePublisher, "send", token, round_id, {})
    again, next_round = opened(controller)
    assert again > token and next_round > round_id


@CALLS_OF_A_ROUND
def test_a_call_to_a_round_that_never_was_is_out_of_order(controller: Either, call: Call) -> None:
    token, round_id = opened(controller)
    refused(controller, Conflict, *call(token, round_id + 1))


def test_a_round_without_a_payload_is_the_publishers_mistake(controller: Either) -> None:
    token = controller.answer("acquire", "trainer").token
    controller.answer("connect", token, {})
    round_id = controller.answer("open_round", token, OPTIONS)
    refused(controller, InvalidRequest, "close_round", token, round_id, None)
    assert controller.answer("fleet").committed_version == 0


def test_tokens_and_rounds_have_new_numbers(controller: Either) -> None:
    first = opened(controller)
    controller.answer("release", first[0])
    second = opened(controller)
    assert second[0] > first[0] and second[1] > first[1]
