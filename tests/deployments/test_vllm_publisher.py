"""vLLM's trainer engine and HTTP client, unchanged, against routes, ledger and staging: all or none."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

from tests.deployments.staged_fleet import LIMIT_S, StagedFleet, staged_fleet
from tests.deployments.weights.staging.memory_worker import Tensors, weights
from tests.deployments.weights.transports.transport_fleet import ListSource
from tests.deployments.weights.transports.vllm_trainer import vllm_without_a_gpu
from tests.deployments.weights.transports.vllm_wires import init_info
from tests.waiting import reached

pytestmark = pytest.mark.filterwarnings("ignore:Tensor .* has size")  # vLLM's, of a buffer this small
WIRES = ["ipc", "ipc packed", "nccl", "nccl packed"]


@pytest.fixture(autouse=True)
def _without_a_gpu() -> Iterator[None]:
    with vllm_without_a_gpu():
        yield


async def connect(fleet: StagedFleet, wire: str, source: ListSource) -> Any:
    """A trainer as vLLM's examples make theirs, with its defaults but for the size of the buffer."""
    workers = (await fleet.http.get("/get_world_size")).json()["world_size"]
    # Two pieces: over NCCL one is full when it has more than this, over IPC when the next does not fit.
    info = init_info(wire, workers, 20 if wire.startswith("nccl") else 24)
    client = fleet.client()
    return await asyncio.wait_for(
        asyncio.to_thread(WeightTransferTrainerFactory.trainer_init, info, client=client, source=source),
        LIMIT_S,
    )


def live(fleet: StagedFleet) -> dict[str, Tensors]:
    """What each replica computes with."""
    return {name: list(replica.worker.model.tensors().items()) for name, replica in fleet.replicas.items()}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
async def test_a_round_of_vllms_trainer_is_staged_committed_everywhere_and_stored(
    wire: str, tmp_path: Path
) -> None:
    async with staged_fleet(tmp_path, wire, "a", "b") as fleet:
        source = ListSource(weights(1.0))
        trainer = await connect(fleet, wire, source)
        for version in (1, 2):
            source.tensors = weights(float(version))
            await asyncio.wait_for(asyncio.to_thread(trainer.send_weights), LIMIT_S)
            for tensors in live(fleet).values():
                assert_equal(tensors, source.tensors)
        last = (await fleet.controller.rounds())[-1]
        assert (last.phase, last.version, set(last.replicas)) == ("committed", 2, {"a", "b"})
        checks = ["names", "shapes", "dtypes", "complete", "finite", "replicas"]
        assert [check.value for check in last.checks] == checks
        manifest = tmp_path / "store" / "v00000002" / "manifest.json"
        await reached(manifest.exists)
        assert json.loads(manifest.read_text())["digest"] == last.digest
