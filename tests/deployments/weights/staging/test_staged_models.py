from pathlib import Path

import pytest

from tests.deployments.weights.staging.families import AMX
from tests.deployments.weights.staging.staged_models import stage_families
from tests.forked import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_KERNELS = [
    "onednn",
    pytest.param("amx", marks=[pytest.mark.long, pytest.mark.skipif(not AMX, reason="this CPU has no amx")]),
    pytest.param("torch", marks=pytest.mark.long),
]
_LORA_REFUSED = "staging 'device' is not possible on this CPU: LoRA wraps the live modules; 'host' is"
# By family, what the reason says.
_REFUSED = {
    "host": {
        "gpt-oss": "GptOssForCausalLM copies weights past its loaders",
        "experts-lora": "keeps the former weights of experts that LoRA wraps",
        "tied-twice": "'lm_head.weight' must be equal to the input embeddings",
    },
    "shadow": {"dense-lora": _LORA_REFUSED, "experts-lora": _LORA_REFUSED, "tied-twice": "they differ"},
}
_REFUSED_WITH_AMX = {"mla": "drop the weights of 'kv_b_proj'"}


def check(directory: Path, kind: str, kernels: str, families: set[str]) -> None:
    results = call(stage_families, directory, kind, kernels, timeout_s=580.0, VLLM_CPU_KVCACHE_SPACE="1")
    assert results.keys() == families
    refusals = _REFUSED.get(kind, {}) | (_REFUSED_WITH_AMX if (kind, kernels) == ("host", "amx") else {})
    assert not {family: each["failed"] for family, each in results.items() if "failed" in each}
    refused = {family: each["refused"] for family, each in results.items() if "refused" in each}
    expected = {family: why for family, why in refusals.items() if family in families}
    assert refused.keys() == expected.keys(), refused
    assert not {family: why for family, why in refused.items() if expected[family] not in why}
    behind = {
        (family, step): names
        for family, each in results.items()
        for step, names in {**each.get("behind", {}), "refused": each.get("behind after", [])}.items()
    }
    assert not {step: names for step, names in behind.items() if names}
    assert behind, "some were staged"


@pytest.mark.parametrize("kernels", _KERNELS)
@pytest.mark.parametrize("kind", [pytest.param("host", marks=pytest.mark.long), "shadow"])
def test_rounds_on_a_cpu_equal_fresh_loads_or_are_refused(kind: str, kernels: str, tmp_path: Path) -> None:
    families = {"experts", "dense", "gpt-oss", "mamba", "mla", "padded-experts", "tied", "tied-twice"}
    wrapped = {"experts-lora", "dense-lora"} if kernels != "torch" else set()
    check(tmp_path, kind, kernels, families | wrapped)


def test_rounds_of_device_staging_on_a_cpu_equal_fresh_loads(tmp_path: Path) -> None:
    check(tmp_path, "without_gpu", "torch", {"dense", "mla"})


@pytest.mark.gpu
def test_rounds_of_device_staging_equal_fresh_loads(tmp_path: Path) -> None:
    check(tmp_path, "device", "cuda", {"fp8-experts", "experts", "dense", "mla", "fp8"})
