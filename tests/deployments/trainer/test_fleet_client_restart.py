"""A controller dies under a publisher's calls, and its successor is asked."""

from pathlib import Path
from typing import Any, Literal

import pytest
from ray.exceptions import ActorDiedError

from deployments.errors import FleetUnavailable, TransferAborted
from deployments.lost_calls import RESTART_WAIT_S
from tests.deployments.controller_in_process import RESTART_S, ControllerInProcess
from tests.deployments.trainer.fleet_clients import client_of, run_round


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["connect", "open_round", "send"])
def test_a_round_whose_controller_dies_before_the_close_is_to_be_sent_again(
    method: str, when: Literal["before", "after"], controller: ControllerInProcess
) -> None:
    controller.dies_in[method] = when
    client = client_of(controller)
    with pytest.raises(TransferAborted, match=f"lost during '{method}'") as caught:
        run_round(client)
    assert caught.value.detail == {"send_again": True}
    client.abort("the round failed")
    run_round(client)
    assert client.report is not None and client.report.version == 1


def test_a_controller_that_dies_before_the_decision_aborts_the_round_it_had(
    controller: ControllerInProcess,
) -> None:
    controller.dies_in["close_round"] = "before"
    client = client_of(controller)
    with pytest.raises(TransferAborted, match="round 1 aborted: the controller restarted") as caught:
        run_round(client)
    assert caught.value.detail["send_again"] is True
    assert controller.status.committed_version == 0 and client.report is None


def test_a_controller_that_dies_after_the_decision_has_committed_the_round(
    caplog: pytest.LogCaptureFixture, controller: ControllerInProcess
) -> None:
    controller.dies_in["close_round"] = "after"
    client = client_of(controller)
    client.label = "mine"
    with caplog.at_level("WARNING", "ray.serve"):
        run_round(client)
    assert client.report is not None
    assert (client.report.version, client.report.label, client.report.round_id) == (1, "mine", 1)
    assert controller.status.committed_version == 1 and RESTART_S <= controller.now < RESTART_S + 1
    assert [each.getMessage() for each in caplog.records] == [
        "close_round of round 1: who was to answer is gone; its successor is asked"
    ]
    run_round(client)
    assert client.report.version == 2


def test_a_version_that_another_publisher_committed_is_never_taken_for_ones_own(
    controller: ControllerInProcess,
) -> None:
    client, other = client_of(controller), client_of(controller, "other")
    controller.dies_in["close_round"] = "before"
    # The successor is up and another publisher is quicker than the question.
    controller.at(0.1, lambda: run_round(other))
    with pytest.raises(TransferAborted):
        run_round(client)
    assert client.report is None and other.report is not None and other.report.version == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_release_does_not_hide_that_the_round_is_committed(
    when: Literal["before", "after"], controller: ControllerInProcess
) -> None:
    controller.dies_in["release"] = when
    client = client_of(controller)
    run_round(client)
    assert client.report is not None and client.report.version == 1


@pytest.mark.parametrize("method", ["acquire", "fleet"])
def test_a_question_is_asked_again_of_the_successor(method: str, controller: ControllerInProcess) -> None:
    controller.dies_in[method] = "after"
    client = client_of(controller)
    assert client.fleet().committed_version == 0
    run_round(client)
    assert client.report is not None and client.report.version == 1


def test_the_wait_for_a_successor_is_bounded(tmp_path: Path) -> None:
    controller = DyingController(tmp_path)
    client = client_of(controller)
    with pytest.raises(FleetUnavailable, match=r"fleet: nobody answered within 120 s"):
        client.fleet()
    assert RESTART_WAIT_S <= controller.now <= RESTART_WAIT_S + RESTART_S + 1
    controller.close()


def test_the_membership_is_read_when_all_who_served_have_returned(controller: ControllerInProcess) -> None:
    controller.add_replica()
    controller.restart("r0")
    controller.at(7.0, lambda: controller.resume("r0"))
    client = client_of(controller)
    assert [each.state for each in client.fleet().members] == ["serving", "serving"]
    assert controller.now == pytest.approx(7.0, abs=0.3)


class DyingController(ControllerInProcess):
    """Every process of it dies before its first call."""

    def answer(self, method: str, *args: Any) -> Any:
        self.up_at = self.now + RESTART_S
        raise ActorDiedError
