"""A publisher's rounds and its lease, on a virtual clock."""

import pytest

from deployments.errors import Conflict, FleetUnavailable, RoundAborted, StalePublisher
from deployments.trainer.fleet_client import CALL_TIMEOUT_S, CLEAN_UP_TIMEOUT_S
from tests.deployments.controller_in_process import LEASE_S, ControllerInProcess
from tests.deployments.trainer.fleet_clients import OPTIONS, client_of, run_round

ONE_ROUND = ["acquire", "connect", "open_round", "send", "close_round", "release"]


def test_a_round_is_four_calls_under_one_lease_that_is_released_at_the_end(
    controller: ControllerInProcess,
) -> None:
    client = client_of(controller)
    client.label = "step-1"
    run_round(client)
    assert controller.calls == ONE_ROUND
    assert controller.last["open_round"][1] is OPTIONS
    assert client.report is not None
    assert (client.report.version, client.report.label) == (1, "step-1")
    assert controller.status.lease is None


def test_the_next_round_takes_a_new_lease_and_needs_no_new_connection(
    controller: ControllerInProcess,
) -> None:
    client = client_of(controller)
    run_round(client)
    reports = [client.report]
    client.start_weight_update()
    reports.append(client.report)
    client.update_weights({})
    client.finish_weight_update()
    reports.append(client.report)
    assert controller.calls[len(ONE_ROUND) :] == ["acquire", "open_round", "send", "close_round", "release"]
    assert [None if report is None else report.version for report in reports] == [1, None, 2]


def test_a_version_that_vllm_states_takes_precedence_over_the_label(controller: ControllerInProcess) -> None:
    client = client_of(controller)
    client.label = "mine"
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({})
    client.finish_weight_update("vllm's")
    assert client.report is not None and client.report.label == "vllm's"


@pytest.mark.parametrize("method", ["connect", "open_round", "send", "close_round"])
def test_the_lease_is_renewed_while_a_call_outlasts_it(method: str, controller: ControllerInProcess) -> None:
    controller.takes_s[method] = 2.5 * LEASE_S
    client = client_of(controller)
    run_round(client)
    assert client.report is not None and client.report.phase == "committed"
    assert controller.now == 2.5 * LEASE_S
    renewed = controller.calls.index(method) + 1
    assert controller.calls[renewed : renewed + 7] == ["renew"] * 7, "three times per duration of the lease"
    assert [call for call in controller.calls if call != "renew"] == ONE_ROUND


def test_a_lease_that_is_lost_while_a_call_runs_raises_stale_publisher(
    controller: ControllerInProcess,
) -> None:
    controller.takes_s["send"] = LEASE_S
    client = client_of(controller)
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    # A restarted trainer acquires under the same name.
    controller.at(30.0, lambda: controller.ask("acquire", "trainer"))
    with pytest.raises(StalePublisher, match="token 1 is stale"):
        client.update_weights({})
    assert controller.now == 40.0, "noticed by the second renewal"
    assert client.report is None


def test_a_renewal_that_is_refused_does_not_decide_how_a_close_ended(controller: ControllerInProcess) -> None:
    """A controller dies while it closes a round, and its successor knows no lease but the round's end."""
    controller.takes_s["close_round"] = LEASE_S
    client = client_of(controller)
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({})
    controller.at(LEASE_S / 2, lambda: controller.ask("acquire", "trainer"))
    client.finish_weight_update()
    assert controller.calls.count("close_round") == 2 and controller.status.committed_version == 1
    assert client.report is not None and client.report.version == 1


def test_an_old_publisher_cannot_close_its_round_under_its_successors_lease(
    controller: ControllerInProcess,
) -> None:
    old, new = client_of(controller), client_of(controller)
    old.init_weight_transfer_engine({})
    old.start_weight_update()
    new.init_weight_transfer_engine({})
    new.start_weight_update()
    new.update_weights({})
    with pytest.raises(RoundAborted, match="'trainer' took a new lease"):
        old.finish_weight_update()
    with pytest.raises(StalePublisher, match="token 1 is stale"):
        old.abort("stale")
    new.finish_weight_update()
    assert new.report is not None and new.report.version == 1


def test_another_publishers_lease_is_a_conflict(controller: ControllerInProcess) -> None:
    client_of(controller).init_weight_transfer_engine({})
    with pytest.raises(Conflict, match="'trainer'"):
        client_of(controller, "other").init_weight_transfer_engine({})


def test_a_round_without_a_connection_is_a_conflict(controller: ControllerInProcess) -> None:
    with pytest.raises(Conflict, match="connect before opening a round"):
        client_of(controller).start_weight_update()


def test_abort_ends_the_open_round_and_releases_the_lease(controller: ControllerInProcess) -> None:
    client = client_of(controller)
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.abort("the trainer ran out of memory")
    assert controller.ask("rounds")[-1].reason.endswith("by its publisher: the trainer ran out of memory")
    assert controller.status.round is None and controller.status.lease is None
    run_round(client)
    assert controller.status.committed_version == 1


def test_abort_without_a_round_only_releases_the_lease(controller: ControllerInProcess) -> None:
    client = client_of(controller)
    client.init_weight_transfer_engine({})
    client.abort("not needed")
    assert controller.calls == ["acquire", "connect", "release"]
    client.abort("not needed")
    assert controller.calls == ["acquire", "connect", "release"], "no lease, no call"


def test_aborting_a_round_that_the_controller_aborted_raises_its_error_and_releases_the_lease(
    controller: ControllerInProcess,
) -> None:
    controller.add_replica()
    controller.replica.digest = "bb"
    client = client_of(controller)
    with pytest.raises(RoundAborted, match="replicas disagree"):
        run_round(client)
    with pytest.raises(RoundAborted, match="replicas disagree"):
        client.abort("the round failed")
    assert controller.status.lease is None
    assert client.report is None


def test_a_call_to_a_controller_that_does_not_answer_ends_with_a_timeout(
    controller: ControllerInProcess,
) -> None:
    controller.takes_s["close_round"] = 10 * CALL_TIMEOUT_S
    client = client_of(controller)
    with pytest.raises(FleetUnavailable, match="has not answered 'close_round' within 600 s"):
        run_round(client)
    assert controller.now == CALL_TIMEOUT_S


def test_a_controller_that_hangs_while_the_lease_is_renewed_may_still_answer_the_call(
    controller: ControllerInProcess,
) -> None:
    controller.takes_s = {"send": LEASE_S / 3 + 1, "renew": 3 * LEASE_S}
    client = client_of(controller)
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({})
    assert controller.status.round is not None


def test_cleaning_up_after_a_failed_round_is_quick_where_the_controller_hangs(
    controller: ControllerInProcess,
) -> None:
    client = client_of(controller)
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    controller.takes_s = dict.fromkeys(("abort_round", "release"), 10 * CALL_TIMEOUT_S)
    began = controller.now
    with pytest.raises(TimeoutError):
        client.abort("the round failed")
    assert controller.now - began == 2 * CLEAN_UP_TIMEOUT_S
