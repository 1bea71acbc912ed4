from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from deployments.trainer import fleet_connection
from deployments.trainer.adapter_publisher import AdapterSender, adapter_sender
from deployments.trainer.spec import TrainerSpec
from deployments.weights.transports.ipc import IpcTrainerInitInfo
from tests.deployments.controller_in_process import ControllerInProcess
from tests.two_ranks import both, grouped

TRAINS = "adapter"

pytestmark = pytest.mark.timeout(300)


FILES = {"adapter_config.json": torch.ones(2).byte(), "adapter_model.safetensors": torch.ones(4).byte()}
LARGER = {**FILES, "adapter_model.safetensors": torch.ones(8).byte()}


class Engine:
    """Stands for the transport's trainer half, which needs a GPU. It asks the fleet what that asks."""

    made: ClassVar[list[int]] = []  # ranks
    fault: ClassVar[Exception | None] = None  # of the next round

    def __init__(self, init_info: IpcTrainerInitInfo, client: Any, source: Any) -> None:
        self._client, self._source, self._rank = client, source, init_info.rank
        self.made.append(init_info.rank)
        if self._rank == 0:
            client.init_weight_transfer_engine({})

    def send_weights(self) -> None:
        fault, Engine.fault = Engine.fault, None
        if fault is not None:
            raise fault
        assert all(tensor.numel() for _, tensor in self._source)
        if self._rank == 0:
            self._client.start_weight_update()
            self._client.on_sending()
            self._client.finish_weight_update()

    def shutdown(self) -> None:
        pass


def publishes(sender: AdapterSender, controller: ControllerInProcess, rank: int) -> dict[str, Any]:
    """What this rank saw of some publishes, in their order; both ranks make the same ones."""
    seen: dict[str, Any] = {}

    def publish(what: str, files: dict[str, torch.Tensor] = FILES) -> None:
        before = len(Engine.made)
        sent = sender.send(files)
        if rank == 0:
            sender.end()
        seen[what] = (sent is not None, len(Engine.made) - before)

    publish("first")
    publish("again")
    publish("resized on rank 1", FILES if rank == 0 else LARGER)
    controller.add_replica()
    publish("a replica joined")  # and rank 1 has its old size again
    if rank == 0:
        sender.end()
        seen["rank 0 has nothing"] = (False, 0)
    else:
        publish("rank 0 has nothing")
    controller.connect_as("somebody else")
    publish("another publisher")
    controller.disconnect_as("somebody else")
    publish("after that")
    Engine.fault = None if rank == 0 else RuntimeError("the device is lost")
    try:
        publish("a fault of rank 1")
    except RuntimeError as error:
        seen["raised"] = str(error)
    publish("after the fault")
    return seen


def one_rank(rank: int, spec: TrainerSpec, directory: Path) -> None:
    with grouped(rank, directory):
        fleet_connection.WeightTransferTrainerFactory.trainer_init = Engine  # type: ignore[method-assign, assignment]
        controller = ControllerInProcess(directory / f"rank{rank}")
        sender = adapter_sender(spec, rank, controller)  # type: ignore[arg-type]
        assert sender is not None
        torch.save(publishes(sender, controller, rank), directory / f"seen{rank}.pt")
        controller.close()


@pytest.mark.slow
def test_ranks_connect_together_and_none_waits_for_one_that_does_not_send(
    spec: TrainerSpec, tmp_path: Path
) -> None:
    config = spec.config.model_copy(update={"world_size": 2})
    two = replace(spec, transport="ipc", config=config)
    both(one_rank, two, tmp_path)
    first, second = (torch.load(tmp_path / f"seen{rank}.pt", weights_only=False) for rank in (0, 1))
    expected = {
        "first": (True, 1),
        "again": (True, 0),
        "resized on rank 1": (True, 1),
        "a replica joined": (True, 1),
        "rank 0 has nothing": (False, 0),
        "another publisher": (False, 0),
        "after that": (True, 1),
        "a fault of rank 1": (True, 0),
        "after the fault": (True, 1),
    }
    assert first == expected
    del expected["a fault of rank 1"]
    assert second == {**expected, "raised": "the device is lost"}
