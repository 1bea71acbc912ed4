"""A round is what a fresh load would be, whatever was dropped or loaded before it."""

from pathlib import Path

import pytest

from tests.deployments.weights.staging.dropped_rounds import drop_rounds
from tests.forked import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "kind", ["host", "shadow", "without_gpu", pytest.param("device", marks=pytest.mark.gpu)]
)
def test_round_after_a_dropped_round_equals_a_fresh_load(kind: str, tmp_path: Path) -> None:
    found = call(drop_rounds, tmp_path, kind, VLLM_CPU_KVCACHE_SPACE="1")
    results = {each["family"]: each for each in found}
    assert len(results) == (5 if kind == "device" else 2)
    assert not {name: each["failed"] for name, each in results.items() if "failed" in each}
    behind = {name: {k: v for k, v in each["behind"].items() if v} for name, each in results.items()}
    assert not {name: each for name, each in behind.items() if each}
