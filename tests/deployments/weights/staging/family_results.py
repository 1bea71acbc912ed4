"""What a fixture finds with one of vLLM's kernels, in a process of its own."""

from pathlib import Path
from typing import Any

import pytest

from tests.deployments.weights.staging.cpu_kernels import AMX
from tests.deployments.weights.staging.host_families import swap_all
from tests.forked import call

Results = dict[str, dict[str, Any]]  # by family

KERNELS = [
    "onednn",
    pytest.param("amx", marks=pytest.mark.skipif(not AMX, reason="this CPU has no amx")),
    "torch",
]
ONCE = pytest.mark.parametrize("found", KERNELS[:1], indirect=True)


def family_results(directory: Path, kind: str, kernels: str) -> Results:
    found = call(swap_all, directory, kind, kernels, timeout_s=580.0, VLLM_CPU_KVCACHE_SPACE="1")
    return {each["family"]: each for each in found}
