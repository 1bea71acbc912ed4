"""The worker's half of a load, on vLLM's own LoRA manager: see `adapter_worker`."""

from typing import Any

import pytest

from tests.deployments.replica.adapter_worker import load_adapters
from tests.forked import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = call(load_adapters, tmp_path_factory.mktemp("worker"), VLLM_CPU_KVCACHE_SPACE="1")
    return found


def test_add_lora_takes_what_was_read_ahead(found: dict[str, Any]) -> None:
    assert found["added_from_what_was_read"]


def test_only_add_lora_waits_for_a_decoding_step(found: dict[str, Any]) -> None:
    assert found["added_beside_the_engine"]


def test_evicted_adapter_is_read_by_vllm(found: dict[str, Any]) -> None:
    assert found["read_again_by_vllm"]


def test_unreadable_adapter_is_refused_before_add_lora(found: dict[str, Any]) -> None:
    assert "nothing" in found["refused"] and found["left"] == 0
