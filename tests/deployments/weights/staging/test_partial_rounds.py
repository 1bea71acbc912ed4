"""A round of a publisher that lacks tensors leaves those of the model as they were, whatever came before."""

from pathlib import Path

import pytest

from tests.deployments.weights.staging.partial_rounds import take_partial_rounds
from tests.forked import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "kind", ["host", "shadow", "without_gpu", pytest.param("device", marks=pytest.mark.gpu)]
)
def test_what_is_lacking_stays_as_it_serves(kind: str, tmp_path: Path) -> None:
    found = call(take_partial_rounds, tmp_path, kind, VLLM_CPU_KVCACHE_SPACE="1")
    results = {each["family"]: each for each in found}
    assert len(results) == (5 if kind == "device" else 2)
    assert not {name: each["failed"] for name, each in results.items() if "failed" in each}
    behind = {name: {k: v for k, v in each["behind"].items() if v} for name, each in results.items()}
    assert not {name: each for name, each in behind.items() if each}
