"""Captured streams survive their replica under both of vLLM's model runners for GPUs."""

from pathlib import Path

import pytest

from tests.fleet.gpu_fleets import INVARIANT, needs_gpus, tiny_fleet
from tests.fleet.test_lost_rollouts import check_streams_of_every_route

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]


@needs_gpus(1)
@pytest.mark.parametrize(
    ("runner", "port"), [pytest.param("0", 8397, id="first"), pytest.param("1", 8398, id="second")]
)
def test_streams_of_every_route_survive_their_replica_on_a_gpu(
    tmp_path: Path, runner: str, port: int
) -> None:
    overrides = {
        "engine": {"env": INVARIANT | {"VLLM_USE_V2_MODEL_RUNNER": runner}, "enforce_eager": True},
        "rollouts": {},
    }
    with tiny_fleet("http_ipc", tmp_path, port, overrides) as (fleet, _, _):
        check_streams_of_every_route(fleet, logprob_tolerance=0.05)
