"""Clients of a fake controller, on its virtual clock, and a round of theirs."""

from deployments.protocol.instructions import CommitMode
from deployments.protocol.publishing import RoundOptions
from deployments.trainer.fleet_client import FleetWeightSyncClient
from tests.deployments.controller_in_process import ControllerInProcess

OPTIONS = RoundOptions(commit=CommitMode.ROLLING)


def client_of(controller: ControllerInProcess, publisher: str = "trainer") -> FleetWeightSyncClient:
    return FleetWeightSyncClient(
        controller,  # type: ignore[arg-type]  # a DeploymentHandle's port
        publisher,
        OPTIONS,
        clock=lambda: controller.now,
        sleep=lambda seconds: controller.advance(controller.now + seconds),
    )


def run_round(client: FleetWeightSyncClient) -> None:
    client.init_weight_transfer_engine({"world_size": 2})
    client.start_weight_update()
    client.update_weights({"chunk": 0})
    client.finish_weight_update()
