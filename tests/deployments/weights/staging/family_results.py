"""What a fixture finds with one of vLLM's kernels, in a process of its own."""

from pathlib import Path
from typing import Any

import pytest

from tests.deployments.weights.staging.cpu_kernels import AMX
from tests.deployments.weights.staging.host_families import swap_all
from tests.forked import call

Results = dict[str, dict[str, Any]]  # by family

NO_AMX = pytest.mark.skipif(not AMX, reason="this CPU has no amx")
KERNELS = [
    pytest.param("onednn", marks=pytest.mark.slow),
    pytest.param("amx", marks=[pytest.mark.slow, NO_AMX]),
    pytest.param("torch", marks=pytest.mark.slow),
]
ONCE = pytest.mark.parametrize("found", KERNELS[:1], indirect=True)


def family_results(directory: Path, kind: str, kernels: str) -> Results:
    found = call(swap_all, directory, kind, kernels, timeout_s=580.0, VLLM_CPU_KVCACHE_SPACE="1")
    return {each["family"]: each for each in found}
