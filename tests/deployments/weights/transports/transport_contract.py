"""What the contract tests share: every transport of the registry, a fleet for each, and a publisher."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from deployments.weights.transports.registry import (
    TRANSPORTS,
    KeepPublished,
    TrainerFacts,
    trainer_init_info,
)
from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import version_digest
from tests.deployments.weights.transports.transport_fleet import (
    Fleet,
    ListSource,
    ProcessReceiver,
    Receiver,
    Tensors,
)

CHUNK_BYTES = 4096
PATIENCE_S = 30.0  # longer than any `timeout_of`


def _parameters(names: list[str]) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.gpu) if TRANSPORTS[name].device == "cuda" else name
        for name in names
    ]


every_transport = pytest.mark.parametrize("transport", _parameters(list(TRANSPORTS)))
# The others wait for a peer, and must not wait for ever.
every_waiting_transport = pytest.mark.parametrize(
    "transport", _parameters([n for n in TRANSPORTS if n != "shm"])
)
every_group_transport = pytest.mark.parametrize(
    "transport", _parameters([name for name, transport in TRANSPORTS.items() if transport.rendezvous])
)


def weights(seed: int, device: str = "cpu") -> Tensors:
    """Odd sizes, several dtypes, one tensor larger than a chunk, one empty."""
    torch.manual_seed(seed)
    tensors = [
        ("embed.weight", torch.randn(33, 65).bfloat16()),
        ("norm.weight", torch.randn(7)),
        ("layer.weight", torch.randn(129, 17).half()),
        ("bias", torch.randn(3).bfloat16()),
        ("empty", torch.zeros(0, 4)),
        ("positions", torch.arange(11)),
    ]
    return [(name, tensor.to(device)) for name, tensor in tensors]


def digest_of(tensors: Tensors) -> str:
    return version_digest([name for name, _ in tensors], digests([tensor for _, tensor in tensors]))


def device_of(transport: str) -> str:
    return "cuda:0" if TRANSPORTS[transport].device == "cuda" else "cpu"


def timeout_of(transport: str) -> float:
    """Of every wait of a connection: enough to form a group on a busy machine."""
    return 12.0 if TRANSPORTS[transport].device == "cuda" else 2.0


def make_fleet(transport: str, checkpoint: Path, count: int = 2, corrupt: bool = False) -> Fleet:
    if TRANSPORTS[transport].device == "cpu":
        return Fleet([Receiver(transport, str(checkpoint), "cpu", corrupt) for _ in range(count)])
    gpus = torch.cuda.device_count()
    if transport == "nccl":
        if gpus < 2:
            pytest.skip(f"NCCL needs one GPU per rank, and there is {gpus}")
        devices = [f"cuda:{1 + index}" for index in range(min(count, gpus - 1))]
    else:  # beside the publisher, and on another GPU where there is one
        devices = [f"cuda:{index % min(gpus, 2)}" for index in range(count)]
    keys = [(transport, str(checkpoint), device, corrupt, index) for index, device in enumerate(devices)]
    for key in keys:
        if key not in PROCESSES:
            PROCESSES[key] = ProcessReceiver(*key[:4])
    for key in keys:
        PROCESSES[key].progress()  # it has imported vLLM: no deadline of a test runs before that
    return Fleet([PROCESSES[key] for key in keys])


# A process takes ten seconds to import vLLM: the tests share them.
PROCESSES: dict[tuple[Any, ...], ProcessReceiver] = {}


def stop(receiver: Any) -> None:
    receiver.reset() if isinstance(receiver, ProcessReceiver) else receiver.stop()


def kill(receiver: Any) -> None:
    if isinstance(receiver, ProcessReceiver):
        receiver.kill()
        for key in [key for key, value in PROCESSES.items() if value is receiver]:
            del PROCESSES[key]
    else:
        receiver.stop()


def end_round(transport: str, fleet: Fleet) -> None:
    """Discard what is staged, as after an aborted round; a group of ranks would not survive that."""
    if not TRANSPORTS[transport].rendezvous:
        fleet.drop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def init_info(
    transport: str,
    workers: int,
    timeout_s: float | None = None,
    port: int | None = None,
    keep: KeepPublished | None = None,
) -> TrainerInitInfo:
    facts = TrainerFacts(
        rank=0,
        workers=workers,
        master_address="127.0.0.1",
        master_port=free_port() if port is None else port,
        chunk_bytes=CHUNK_BYTES,
        timeout_s=timeout_of(transport) if timeout_s is None else timeout_s,
        keep_published=keep,
    )
    return trainer_init_info(TRANSPORTS[transport].backend, facts)


def connect_with(info: TrainerInitInfo, fleet: Fleet, source: ListSource) -> TrainerWeightTransferEngine[Any]:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from deployments.vllm_plugin import register

    register()
    return WeightTransferTrainerFactory.trainer_init(init_info=info, client=fleet, source=source)


def connect(transport: str, fleet: Fleet, source: ListSource) -> TrainerWeightTransferEngine[Any]:
    return connect_with(init_info(transport, len(fleet.receivers)), fleet, source)


def publish(transport: str, fleet: Fleet, source: ListSource) -> None:
    engine = connect(transport, fleet, source)
    try:
        engine.send_weights()
    finally:
        engine.shutdown()
