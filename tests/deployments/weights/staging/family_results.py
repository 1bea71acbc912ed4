"""Runs `host_families` in a process of its own, once for a kind of staging."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

Results = dict[tuple[str, str], dict[str, Any]]  # by family, and the kernels that vLLM has


def family_results(directory: Path, kind: str) -> Results:
    done = subprocess.run(
        [sys.executable, "-m", "tests.deployments.weights.staging.host_families", str(directory), kind],
        capture_output=True,
        text=True,
        timeout=580,
        # One thread: more only wait for each other where other tests run as well.
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
    )
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and lines, done.stdout + done.stderr
    print(done.stdout, done.stderr)
    return {(each["family"], each["kernels"]): each for each in map(json.loads, lines)}
