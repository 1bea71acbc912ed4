"""The worker's half of a load, on vLLM's own LoRA manager: see `adapter_worker`."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("worker")
    done = subprocess.run(
        [sys.executable, "-m", "tests.deployments.replica.adapter_worker", str(directory)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
    )
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and lines, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(lines[0])
    return result


def test_vllm_adds_what_was_read_before_and_reads_nothing(found: dict[str, Any]) -> None:
    assert found["added_from_what_was_read"]


def test_vllm_adds_what_a_transport_has_brought(found: dict[str, Any]) -> None:
    assert found["received"] == [9] and found["added_from_what_was_received"]


def test_what_an_engine_has_forgotten_it_reads_by_itself(found: dict[str, Any]) -> None:
    assert found["read_again_by_vllm"]


def test_what_vllm_refuses_is_known_before_anything_is_added(found: dict[str, Any]) -> None:
    assert "nothing" in found["refused"] and found["left"] == 0
