"""vLLM's four calls as a publisher's rounds, over the real controller."""

import threading

import pytest

from deployments.protocol.publishing import RoundOptions
from deployments.trainer.fleet_connection import FleetWeightSyncClient
from tests.deployments.controller_in_process import ControllerInProcess

OPTIONS = RoundOptions(persist=True)
ONE_ROUND = ["acquire", "connect", "open_round", "send", "close_round", "release"]


@pytest.fixture
def client(controller: ControllerInProcess) -> FleetWeightSyncClient:
    return FleetWeightSyncClient(controller, "trainer", OPTIONS)  # type: ignore[arg-type]


def run_round(client: FleetWeightSyncClient) -> None:
    client.init_weight_transfer_engine({"world_size": 2})
    client.start_weight_update()
    client.update_weights({"chunk": 0})
    client.finish_weight_update()


def test_a_round_is_four_calls_under_one_lease_that_is_released_at_the_end(
    controller: ControllerInProcess, client: FleetWeightSyncClient
) -> None:
    client.label = "step-1"
    run_round(client)
    assert controller.calls == ONE_ROUND
    assert controller.last["open_round"][1] is OPTIONS
    assert client.report is not None
    assert (client.report.version, client.report.label) == (1, "step-1")
    assert controller.status.lease is None


def test_the_next_round_takes_a_new_lease_and_needs_no_new_connection(
    controller: ControllerInProcess, client: FleetWeightSyncClient
) -> None:
    run_round(client)
    reports = [client.report]
    client.start_weight_update()
    reports.append(client.report)
    client.update_weights({})
    client.finish_weight_update("vllm's")
    reports.append(client.report)
    assert controller.calls[len(ONE_ROUND) :] == ["acquire", "open_round", "send", "close_round", "release"]
    assert [None if report is None else report.version for report in reports] == [1, None, 2]
    assert reports[-1] is not None and reports[-1].label == "vllm's"


def test_abort_ends_the_open_round_and_releases_the_lease(
    controller: ControllerInProcess, client: FleetWeightSyncClient
) -> None:
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.abort("the trainer ran out of memory")
    assert controller.ask("rounds")[-1].reason.endswith("by its publisher: the trainer ran out of memory")
    assert controller.status.round is None and controller.status.lease is None
    run_round(client)
    assert controller.status.committed_version == 1


def test_the_membership_is_read_when_all_who_served_have_returned(
    controller: ControllerInProcess, client: FleetWeightSyncClient
) -> None:
    controller.add_replica()
    controller.restart("r0")
    threading.Timer(0.05, controller.resume, ["r0"]).start()
    assert [each.state for each in client.fleet().members] == ["serving", "serving"]
