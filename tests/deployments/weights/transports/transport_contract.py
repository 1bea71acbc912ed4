"""What the contract tests of the transports share: the transports, a fleet for each, and a publisher."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from tests.deployments.weights.transports.transport_fleet import (
    Fleet,
    ListSource,
    ProcessReceiver,
    Receiver,
    Tensors,
)

CHUNK_BYTES = 4096
TIMEOUT_S = 4.0
PATIENCE_S = 3 * TIMEOUT_S

ON_A_CPU = ["shm", "gloo"]
ON_GPUS = [
    pytest.param("slipstream_ipc", marks=pytest.mark.gpu),
    pytest.param("slipstream_nccl", marks=pytest.mark.gpu),
]
WITH_A_PEER = ["gloo", *ON_GPUS]  # these wait for somebody, and must not wait for ever

every_transport = pytest.mark.parametrize("transport", [*ON_A_CPU, *ON_GPUS])
every_waiting_transport = pytest.mark.parametrize("transport", WITH_A_PEER)


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


def on_gpu(transport: str) -> bool:
    return transport.startswith("slipstream")


def device_of(transport: str) -> str:
    return "cuda:0" if on_gpu(transport) else "cpu"


def make_fleet(transport: str, checkpoint: Path, count: int = 2, tear: bool = False) -> Fleet:
    if not on_gpu(transport):
        return Fleet([Receiver(transport, str(checkpoint), "cpu", tear) for _ in range(count)])
    gpus = torch.cuda.device_count()
    if transport == "slipstream_nccl":
        if gpus < 2:
            pytest.skip(f"NCCL takes one GPU a rank, and there is {gpus}")
        places = [f"cuda:{1 + index}" for index in range(min(count, gpus - 1))]
    else:
        places = ["cuda:0"] * count
    keys = [(transport, str(checkpoint), place, tear, index) for index, place in enumerate(places)]
    for key in keys:
        if key not in PROCESSES:
            PROCESSES[key] = ProcessReceiver(*key[:4])
    for key in keys:
        PROCESSES[key].connected()  # it has imported vLLM: no deadline of a test runs before that
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


def init_info(transport: str, fleet: Fleet, world_size: int | None = None) -> TrainerInitInfo:
    size = 1 + len(fleet.receivers) if world_size is None else world_size
    common: dict[str, Any] = {"rank": 0, "chunk_bytes": CHUNK_BYTES}
    if transport != "shm":
        common |= {"world_size": size, "timeout_s": TIMEOUT_S}
    if transport in ("gloo", "slipstream_nccl"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            common |= {"master_address": "127.0.0.1", "master_port": probe.getsockname()[1]}
    match transport:
        case "shm":
            from deployments.weights.transports.shm import ShmTrainerInitInfo as Info
        case "gloo":
            from deployments.weights.transports.gloo import GlooTrainerInitInfo as Info
        case "slipstream_ipc":
            from deployments.weights.transports.ipc import IpcTrainerInitInfo as Info
        case _:
            from deployments.weights.transports.nccl import NcclTrainerInitInfo as Info
    return Info(**common)


def connect(transport: str, fleet: Fleet, source: ListSource) -> TrainerWeightTransferEngine[Any]:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from deployments.vllm_plugin import register

    register()
    return WeightTransferTrainerFactory.trainer_init(
        init_info=init_info(transport, fleet), client=fleet, source=source
    )


def publish(transport: str, fleet: Fleet, source: ListSource) -> None:
    engine = connect(transport, fleet, source)
    try:
        engine.send_weights()
    finally:
        engine.shutdown()
