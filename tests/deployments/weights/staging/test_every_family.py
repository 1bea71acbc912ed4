from pathlib import Path

import pytest

from tests.deployments.weights.staging.every_family import walk
from tests.forked import call


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bloom", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_a_tiny_model_of_a_family_is_trained_published_and_stored(family: str, tmp_path: Path) -> None:
    found = call(walk, family, tmp_path, "cpu", "float32", VLLM_CPU_KVCACHE_SPACE="1")
    assert found == dict.fromkeys(("served", "trained", "published", "stored"), "yes")


def test_a_family_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path) -> None:
    assert walk("no-such-family", tmp_path, "cpu", "float32") == {"made": "KeyError: 'no-such-family'"}
