"""vLLM's four calls as a publisher's rounds, over the real controller."""

import threading

import pytest

from deployments.protocol.publishing import RoundOptions
from deployments.trainer.fleet_connection import FleetWeightSyncClient
from tests.deployments.controller_in_process import ControllerInProcess


@pytest.fixture
def client(controller: ControllerInProcess) -> FleetWeightSyncClient:
    return FleetWeightSyncClient(controller, "trainer", RoundOptions())  # type: ignore[arg-type]


def test_a_round_has_the_label_that_vllm_gives_it_or_else_the_publishers_own(
    controller: ControllerInProcess, client: FleetWeightSyncClient
) -> None:
    client.init_weight_transfer_engine({"world_size": 2})
    for given, label in ((None, "step-1"), ("vllm's", "vllm's")):
        client.label = "step-1"
        client.start_weight_update()
        assert client.report is None
        client.update_weights({"chunk": 0})
        client.finish_weight_update(given)
        assert client.report is not None and client.report.label == label
        assert controller.status.lease is None


def test_the_membership_is_read_when_all_who_served_have_returned(
    controller: ControllerInProcess, client: FleetWeightSyncClient
) -> None:
    controller.add_replica()
    controller.restart("r0")
    threading.Timer(0.05, controller.resume, ["r0"]).start()
    assert [each.state for each in client.fleet().members] == ["serving", "serving"]
