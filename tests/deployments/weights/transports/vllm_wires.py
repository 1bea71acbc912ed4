"""The wires that vLLM's own trainer engines speak, and the versions that tests send over them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from tests.deployments.weights.transports.transport_contract import free_port, weights
from tests.deployments.weights.transports.transport_fleet import ListSource, Tensors
from tests.deployments.weights.transports.vllm_trainer import HttpFleet

BUFFER_BYTES = 4608  # the largest tensor has 4386
WIRES: dict[str, dict[str, Any]] = {
    "ipc": {"packed": False},
    "ipc packed": {"packed": True},
    "nccl": {"packed": False},
    "nccl packed": {"packed": True},  # two buffers, vLLM's default
    "nccl packed, one buffer": {"packed": True, "packed_num_buffers": 1},
    "nccl packed, three buffers": {"packed": True, "packed_num_buffers": 3},
}
every_wire = pytest.mark.parametrize("wire", WIRES)
every_nccl = pytest.mark.parametrize("wire", ["nccl", "nccl packed"])
every_ipc = pytest.mark.parametrize("wire", ["ipc", "ipc packed"])


def version(seed: int) -> Tensors:
    """Several pieces, in several dtypes, with sizes that move what follows to odd addresses."""
    more = [(f"more.{i}.weight", torch.randn(1500 + i).bfloat16()) for i in range(6)]
    return [*weights(seed), *more, ("last.bias", torch.randn(5))]


def init_info(wire: str, workers: int, buffer_bytes: int = BUFFER_BYTES) -> TrainerInitInfo:
    options = WIRES[wire] | ({"packed_buffer_size_bytes": buffer_bytes} if WIRES[wire]["packed"] else {})
    if wire.startswith("ipc"):
        return IPCTrainerInitInfo(rank=0, **options)
    return NCCLTrainerInitInfo(
        rank=0, master_address="127.0.0.1", master_port=free_port(), world_size=1 + workers, **options
    )


def connect(wire: str, fleet: HttpFleet, source: ListSource, *sizes: int) -> TrainerWeightTransferEngine[Any]:
    info = init_info(wire, len(fleet.receivers), *sizes)
    return WeightTransferTrainerFactory.trainer_init(info, client=fleet, source=source)


def within(limit_s: float, call: Any) -> Any:
    """Its result; a hang is an error."""
    with ThreadPoolExecutor(max_workers=1) as calls:
        return calls.submit(call).result(limit_s)
