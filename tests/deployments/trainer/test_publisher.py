"""What the trainer's sending half is told, for each way that weights travel."""

from dataclasses import replace
from typing import Any

import pytest
import ray
import torch
from vllm.distributed.weight_transfer.base import ParamMeta

from deployments.trainer.publisher import trainer_init_info
from tests.deployments.trainer.trainer_specs import trainer_spec

SPEC = trainer_spec(chunk_bytes=1 << 20)
TENSORS = [
    ParamMeta("small", torch.bfloat16, (8, 8)),
    ParamMeta("large", torch.bfloat16, (1024, 1024)),
]


def info(**changes: Any) -> Any:
    return trainer_init_info(replace(SPEC, **changes), 0, 6, TENSORS)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


@pytest.mark.parametrize(
    ("transport", "native", "backend"),
    [
        ("shm", False, "shm"),
        ("gloo", False, "gloo"),
        ("ipc", False, "slipstream_ipc"),
        ("nccl", False, "slipstream_nccl"),
        ("ipc", True, "ipc"),
        ("nccl", True, "nccl"),
    ],
)
def test_each_transport_has_its_sending_half(transport: str, native: bool, backend: str) -> None:
    made = info(transport=transport, native=native)
    assert made.backend == backend
    if hasattr(made, "world_size"):
        assert made.world_size == 7, "the publisher and six workers"


def test_vllms_own_engines_get_one_nccl_buffer_and_room_for_the_largest_tensor() -> None:
    assert info(transport="nccl", native=True).packed_num_buffers == 1
    packed = info(transport="ipc", native=True)
    assert packed.packed and packed.packed_buffer_size_bytes == 2 << 20
    assert info(transport="ipc", native=True, chunk_bytes=1 << 22).packed_buffer_size_bytes == 1 << 22


def test_a_transport_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="one of 'shm', 'gloo', 'ipc', 'nccl', got 'tcp'"):
        info(transport="tcp")
