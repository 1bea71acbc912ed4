from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deployments.weights.transports.transport_contract import (
    connect_with,
    device_of,
    every_transport,
    init_info,
    make_fleet,
    publish,
    stop,
    weights,
)
from tests.deployments.weights.transports.transport_fleet import FilesFleet, ListSource, Rejected, Tensors

NAMES = ("adapter_config.json", "adapter_model.safetensors")


def files(seed: int) -> Tensors:
    torch.manual_seed(seed)
    return [
        (name, torch.randint(256, (size,), dtype=torch.uint8))
        for name, size in zip(NAMES, (611, 70_003), strict=True)
    ]


def connected(transport: str, fleet: FilesFleet, source: ListSource) -> Any:
    """As an adapter's sender: a transfer is one chunk."""
    info: Any = init_info(transport, len(fleet.receivers))
    return connect_with(replace(info, chunk_bytes=1 << 62), fleet, source)


def written(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir()}


def sent(tensors: Tensors) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors}


@pytest.fixture
def receiving(transport: str, checkpoint: Path, tmp_path: Path) -> Iterator[FilesFleet]:
    made = make_fleet(transport, checkpoint)
    receivers = made.receivers
    yield FilesFleet(receivers, directories=[tmp_path / f"r{index}" for index in range(len(receivers))])
    for receiver in receivers:
        stop(receiver)


@every_transport
def test_every_replica_has_the_files_byte_for_byte(transport: str, receiving: FilesFleet) -> None:
    source = ListSource(files(1))
    engine = connected(transport, receiving, source)
    for seed in (1, 2, 3):  # over one connection
        source.tensors = files(seed)
        receiving.directories = [each.with_name(f"{each.name}-{seed}") for each in receiving.directories]
        engine.send_weights()
        assert [written(each) for each in receiving.directories] == [sent(source.tensors)] * len(
            receiving.receivers
        )
    engine.shutdown()


@pytest.mark.parametrize("transport", ["shm", "gloo"])  # a connection releases the staging on a device
def test_what_is_staged_of_the_model_stays(transport: str, receiving: FilesFleet, checkpoint: Path) -> None:
    fleet = make_fleet(transport, checkpoint)
    try:
        publish(transport, fleet, ListSource(weights(1, device_of(transport))))
        fleet.verify()
        before = [each.staged() for each in fleet.receivers]
        receiving.receivers, own = fleet.receivers, receiving.receivers
        receiving.directories = receiving.directories[: len(fleet.receivers)]
        engine = connected(transport, receiving, ListSource(files(1)))
        engine.send_weights()
        engine.shutdown()
        receiving.receivers = own
        assert [each.staged() for each in fleet.receivers] == before
    finally:
        for each in fleet.receivers:
            stop(each)


@every_transport
def test_damaged_bytes_are_rejected_and_leave_nothing(
    transport: str, checkpoint: Path, tmp_path: Path
) -> None:
    fleet = make_fleet(transport, checkpoint, corrupt=True)
    receiving = FilesFleet(
        fleet.receivers, directories=[tmp_path / str(i) for i in range(len(fleet.receivers))]
    )
    engine = connected(transport, receiving, ListSource(files(1)))
    with pytest.raises(Rejected, match=r"adapter_model\.safetensors' was sent with digest"):
        engine.send_weights()
    engine.shutdown()
    for receiver in fleet.receivers:
        stop(receiver)
    assert not list(tmp_path.glob("*"))


@every_transport
@pytest.mark.parametrize(
    ("name", "tensor"),
    [("../a", torch.zeros(3, dtype=torch.uint8)), ("a", torch.zeros(3)), ("a", torch.zeros(3, 1).byte())],
)
def test_only_the_bytes_of_files_are_taken(
    transport: str, receiving: FilesFleet, tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    engine = connected(transport, receiving, ListSource([(name, tensor)]))
    with pytest.raises(Rejected, match=r"expected the bytes of a file, uint8 \[size\], got"):
        engine.send_weights()
    engine.shutdown()
    assert not list(tmp_path.glob("*"))


@every_transport
def test_memory_without_room_is_a_refusal_and_no_fault(
    transport: str, receiving: FilesFleet, tmp_path: Path
) -> None:
    receiving.directories = [Path("/proc/1/none") for _ in receiving.directories]
    engine = connected(transport, receiving, ListSource(files(1)))
    with pytest.raises(Rejected, match="cannot be written to shared memory"):
        engine.send_weights()
    engine.shutdown()
