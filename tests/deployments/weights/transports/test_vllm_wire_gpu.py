"""vLLM's own trainer engines on a GPU, and a worker's staging in a process of its own: no engine, no fleet.

The first to run where there is a GPU.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deployments.protocol.poll import Outcome
from tests.deployments.weights.transports.transport_contract import digest_of
from tests.deployments.weights.transports.transport_fleet import (
    ListSource,
    ProcessReceiver,
    Rejected,
    Tensors,
    write_checkpoint,
)
from tests.deployments.weights.transports.vllm_trainer import HttpFleet
from tests.deployments.weights.transports.vllm_wires import connect

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SHAPES = {"embed.weight": (1000, 512), "norm.weight": (512,), "lm_head.weight": (1000, 512)} | {
    f"layers.{i}.{name}.weight": (512, 512 + i) for i in range(4) for name in ("up", "down")
}
BUFFER_BYTES = 1 << 21


def version(seed: int) -> Tensors:
    """13 MB in bfloat16, and a float32 tensor that vLLM's packing moves to any address."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors = [
        (name, torch.randn(shape, generator=generator, device="cuda").to(_dtype(name)))
        for name, shape in SHAPES.items()
    ]
    torch.cuda.synchronize()  # vLLM's packed sender does not wait: `test_vllm_packed_sender_gpu`
    return tensors


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "norm.weight" else torch.bfloat16


@pytest.fixture
def fleet(wire: str, tmp_path: Path) -> Iterator[HttpFleet]:
    engine = wire.split()[0]
    needed = 2 if engine == "nccl" else 1
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs, there are {torch.cuda.device_count()}")
    torch.cuda.set_device(0)
    write_checkpoint(tmp_path, version(0))
    receiver = ProcessReceiver(f"staged_{engine}", str(tmp_path), f"cuda:{needed - 1}", False)
    receiver.progress()  # it has imported vLLM: no deadline runs before that
    yield HttpFleet([receiver])
    receiver.kill()


every_wire = pytest.mark.parametrize("wire", ["ipc", "ipc packed", "nccl", "nccl packed"])


@every_wire
def test_rounds_are_staged_bit_for_bit_and_the_trainers_memory_does_not_grow(
    wire: str, fleet: HttpFleet
) -> None:
    source = ListSource(version(1))
    sender = connect(wire, fleet, source, BUFFER_BYTES)
    held = []
    for seed in range(1, 9):
        source.tensors = version(seed)
        sender.send_weights()
        (state,) = fleet.verify()
        assert (state.outcome, state.message) == (Outcome.DONE, "")
        assert state.digest == digest_of(source.tensors)
        assert fleet.receivers[0].staged() == state.digest
        torch.cuda.ipc_collect()
        held.append(torch.cuda.memory_allocated())
    print("bytes allocated after each round:", held)
    assert held[-1] <= held[2], "what a round shared comes back"
    sender.shutdown()


@every_wire
def test_what_is_refused_leaves_the_trainer_free(wire: str, fleet: HttpFleet) -> None:
    tensors = version(1)
    dict(tensors)["layers.2.up.weight"][511, 513] = float("nan")
    torch.cuda.synchronize()
    sender = connect(wire, fleet, ListSource(tensors), BUFFER_BYTES)
    with pytest.raises(Rejected, match=r"^'layers.2.up.weight' holds NaN or infinity$"):
        sender.send_weights()
    fleet.drop()
    tensors[0] = ("strange", torch.zeros(2, device="cuda"))
    sender = connect(wire, fleet, ListSource(tensors), BUFFER_BYTES)
    with pytest.raises(Rejected, match=r"^'strange' is not a tensor of this model$"):
        sender.send_weights()
    sender.shutdown()
