"""The transfer of an adapter's files to the replicas, beside the controller's load of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deployments.protocol.errors import Conflict
from deployments.trainer.adapter_publisher import FileSource, adapter_sender
from deployments.trainer.spec import TrainerSpec
from tests.deployments.controller_in_process import ControllerInProcess, Fate
from tests.deployments.trainer.one_adapter import TENSORS, live_files, published, started
from tests.deployments.trainer.one_worker import BATCH, lines
from tests.tiny_adapters import save_tiny_adapter

TRAINS = "adapter"

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]  # optimizer steps


def test_the_replicas_receive_the_bytes_that_the_store_keeps(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = started(spec, controller)
    for count in (1, 2, 3):
        worker.step(BATCH)
        report = published(worker)
        assert report.transfer_s is not None and len(controller.replica.adapters.received) == count
        *_, received = controller.replica.files_received.values()
        assert received == {each.name: each.read_bytes() for each in live_files(controller)[-1].iterdir()}
    assert controller.calls.count("connect") == 1 and controller.status.lease is None
    controller.add_replica()
    assert published(worker).transfer_s is not None and controller.calls.count("connect") == 2


def test_a_connection_is_for_files_of_one_size(tmp_path: Path) -> None:
    def files(name: str, seed: int, **settings: int) -> dict[str, torch.Tensor]:
        directory = save_tiny_adapter(tmp_path / name, seed, **settings)
        contents = {each: (directory / each).read_bytes() for each in ("adapter_config.json", TENSORS)}
        return {each: torch.tensor(list(content), dtype=torch.uint8) for each, content in contents.items()}

    source = FileSource()
    assert source.take(files("a", 1))
    source.forget()
    assert not source.take(files("b", 2))
    assert source.take(files("c", 1, lora_alpha=1234567))


def test_the_connection_of_another_publisher_is_left_to_it(
    spec: TrainerSpec, controller: ControllerInProcess, caplog: pytest.LogCaptureFixture
) -> None:
    worker = started(spec, controller)
    worker.step(BATCH)
    controller.connect_as("somebody else")
    with caplog.at_level("WARNING", "ray.serve"):
        assert published(worker).transfer_s is None and controller.live == ["math@1"]
    assert "'somebody else' is connected" in lines(caplog)[-1] and "connect" not in controller.calls


@pytest.mark.parametrize("method", ["acquire", "connect", "send", "release"])
def test_a_transfer_that_fails_costs_the_transfer_and_not_the_publish(
    spec: TrainerSpec, controller: ControllerInProcess, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = started(spec, controller)
    worker.step(BATCH)
    fates: tuple[Fate | None, ...] = (None, "before", "after")
    for fate in fates:
        controller.disconnect_as("trainer")  # as it begins
        caplog.clear()
        with caplog.at_level("WARNING", "ray.serve"):
            if fate is None:
                controller.fails[method] = Conflict("not now")
            else:
                controller.dies_in[method] = fate
            report = published(worker)
        assert controller.live[-1] == f"math@{report.version}", fate
        failures = [each for each in lines(caplog) if "its transfer over 'shm' failed" in each]
        assert len(failures) == (report.transfer_s is None), fate
        if method in ("connect", "send"):  # others are asked again, or matter to nobody
            assert report.transfer_s is None, fate
        assert published(worker).transfer_s is not None, "the next one is sent again"


@pytest.mark.parametrize(
    ("transport", "ranks", "native", "senders"),
    [
        ("ipc", 1, False, [True]),
        ("ipc", 2, False, [True, True]),
        ("nccl", 2, False, [True, False]),
        ("ipc", 2, True, [False, False]),
        ("nccl", 1, True, [False]),
    ],
)
def test_every_rank_sends_where_one_does_not_reach_all_and_none_over_vllms_own(
    spec: TrainerSpec,
    controller: ControllerInProcess,
    transport: str,
    ranks: int,
    native: bool,
    senders: list[bool],
) -> None:
    config = spec.config.model_copy(update={"world_size": ranks})
    other = replace(spec, transport=transport, native=native, config=config)
    made = [adapter_sender(other, rank, controller) for rank in range(ranks)]  # type: ignore[arg-type]
    assert [each is not None for each in made] == senders
