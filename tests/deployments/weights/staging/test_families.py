"""What real vLLM models keep of their weights, with vLLM's own layers and loading."""

from pathlib import Path
from typing import Any

import pytest

from tests.deployments.weights.staging.families import has_onednn, inspect_all
from tests.forked import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(directory: Path, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call(inspect_all, directory, kind, VLLM_CPU_KVCACHE_SPACE="1")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    results = run(tmp_path_factory.mktemp("families"), "cpu")
    return {(each["family"], each["kernels"]): each for each in results}


@pytest.mark.parametrize("family", ["dense", "experts", "mla", "gpt-oss", "kv-scales", "compiled"])
def test_a_second_instance_is_swapped_completely(family: str, found: dict[tuple[str, str], Any]) -> None:
    assert found[family, "torch"]["behind"] == []


def test_kv_cache_scales_are_swapped_as_tensors_and_floats(
    found: dict[tuple[str, str], Any],
) -> None:
    result = found["kv-scales", "torch"]
    assert result["layerwise"]
    for layer in (0, 1):
        attention = f"model.layers.{layer}.self_attn.attn"
        assert f"{attention}._k_scale_cpu" in result["tensors"]
        assert f"{attention}._k_scale_float" in result["numbers"]
        assert f"{attention}._v_scale_float" in result["numbers"]


@pytest.mark.parametrize("family", ["dense", "compiled"])
def test_a_dense_model_has_nothing_beside_its_parameters(
    family: str, found: dict[tuple[str, str], Any]
) -> None:
    result = found[family, "torch"]
    assert (result["layerwise"], result["tensors"], result["numbers"]) == (False, [], [])


@pytest.mark.parametrize("family", ["dense", "experts", "mla", "gpt-oss", "kv-scales"])
def test_onednn_packed_weights_are_refused_by_name(family: str, found: dict[tuple[str, str], Any]) -> None:
    # oneDNN's handlers on a CPU: the address of the packed weights is all that can be seen of them.
    if not has_onednn():
        assert found[family, "onednn"]["behind"] == [], "vLLM took torch's kernels"
        pytest.skip("oneDNN does not multiply bfloat16 on this CPU")
    assert "handler_tensor' holds addresses" in found[family, "onednn"]["refused"]


@pytest.mark.gpu
def test_on_a_gpu_each_family_is_swapped_completely_or_refused_by_name(tmp_path: Path) -> None:
    results = {each["family"]: each for each in run(tmp_path, "cuda")}
    assert results.keys() >= {
        "compiled",
        "dense",
        "experts",
        "mla",
        "gpt-oss",
        "mxfp4",
        "kv-scales",
        "fp8",
        "fp8-experts",
    }
    assert not {name: each["failed"] for name, each in results.items() if "failed" in each}
    refused = {name: each["refused"] for name, each in results.items() if "refused" in each}
    assert refused.keys() <= {"mxfp4"}, refused  # with a kernel that keeps addresses, say
    assert not {name: each["behind"] for name, each in results.items() if each.get("behind")}
    assert any("_k_scale_float" in name for name in results["kv-scales"]["numbers"])
