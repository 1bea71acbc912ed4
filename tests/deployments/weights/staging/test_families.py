"""What real vLLM models keep of their weights, with vLLM's own layers and loading."""

from pathlib import Path
from typing import Any

import pytest

from tests.deployments.weights.staging.families import FAMILIES, GPU_FAMILIES, has_onednn, inspect_families
from tests.forked import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def inspect(directory: Path, kernels: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = call(inspect_families, directory, kernels, VLLM_CPU_KVCACHE_SPACE="1")
    assert not {name: each["failed"] for name, each in found.items() if "failed" in each}
    assert not {name: each["behind"] for name, each in found.items() if each.get("behind")}
    return found


def test_a_second_instance_is_swapped_completely(tmp_path: Path) -> None:
    found = inspect(tmp_path, "torch")
    assert found.keys() == FAMILIES.keys()
    assert not {name: each["refused"] for name, each in found.items() if "refused" in each}
    for dense in ("dense", "compiled"):
        result = found[dense]
        assert (result["layerwise"], result["tensors"], result["numbers"]) == (False, [], []), dense
    scales = found["kv-scales"]
    assert scales["layerwise"]
    for layer in (0, 1):
        attention = f"model.layers.{layer}.self_attn.attn"
        assert f"{attention}._k_scale_cpu" in scales["tensors"]
        assert {f"{attention}._k_scale_float", f"{attention}._v_scale_float"} <= set(scales["numbers"])


def test_onednn_packed_weights_are_refused_by_name(tmp_path: Path) -> None:
    if not has_onednn():
        pytest.skip("oneDNN does not multiply bfloat16 on this CPU")
    # The address of the packed weights is all that can be seen of them.
    found = inspect(tmp_path, "onednn")
    for family in ("dense", "experts", "mla", "gpt-oss", "kv-scales"):
        assert "handler_tensor' holds addresses" in found[family]["refused"], family


@pytest.mark.gpu
def test_on_a_gpu_each_family_is_swapped_completely_or_refused_by_name(tmp_path: Path) -> None:
    found = inspect(tmp_path, "cuda")
    assert found.keys() == GPU_FAMILIES.keys()
    refused = {name: each["refused"] for name, each in found.items() if "refused" in each}
    assert refused.keys() <= {"mxfp4"}, refused  # with a kernel that keeps addresses, say
    assert any("_k_scale_float" in name for name in found["kv-scales"]["numbers"])
