"""A round of a publisher that lacks tensors leaves those of the model as they were, whatever came before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    "kind", ["host", "shadow", "without_gpu", pytest.param("device", marks=pytest.mark.gpu)]
)
def test_what_is_lacking_stays_as_it_serves(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.deployments.weights.staging.partial_rounds", str(tmp_path), kind],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and lines, done.stdout + done.stderr
    print(done.stdout, done.stderr)
    results = {each["family"]: each for each in map(json.loads, lines)}
    assert len(results) == (5 if kind == "device" else 2)
    assert not {name: each["failed"] for name, each in results.items() if "failed" in each}
    behind = {name: {k: v for k, v in each["behind"].items() if v} for name, each in results.items()}
    assert not {name: each for name, each in behind.items() if each}
