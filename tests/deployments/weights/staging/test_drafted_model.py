"""A policy and its drafter are one version: staged, refused, swapped and dropped together."""

from pathlib import Path
from typing import Any

import pytest

from tests.deployments.weights.staging.drafted import rounds, rounds_with_mtp, speculate, speculate_alone
from tests.deployments.weights.staging.families import AMX
from tests.forked import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ON_GPU = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,  # not measured, which other tests on the GPU disturb
    "weight_transfer_config": {"backend": "slipstream_ipc"},
}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.mark.parametrize("kind", ["host", "shadow", "without_gpu"])
def test_rounds_with_a_drafter_equal_fresh_loads(kind: str, tmp_path: Path) -> None:
    found = call(rounds, tmp_path, kind, VLLM_CPU_KVCACHE_SPACE="1")
    assert len(found) == 8 and not {step: names for step, names in found.items() if names}


@pytest.mark.parametrize("kind", [pytest.param("host", marks=pytest.mark.long), "shadow", "without_gpu"])
def test_rounds_with_a_drafter_of_the_served_checkpoint_equal_fresh_loads(kind: str, tmp_path: Path) -> None:
    found = call(rounds_with_mtp, tmp_path, kind, VLLM_CPU_KVCACHE_SPACE="1")
    assert len(found) == 5 and not {step: names for step, names in found.items() if names}


@pytest.mark.parametrize(
    ("staging", "kind", "method"),
    [
        ("host", "HostStaging", "eagle3"),
        pytest.param("device", "CpuShadowStaging", "draft_model", marks=pytest.mark.long),
    ],
)
def test_an_engine_drafts_with_what_was_published(
    staging: str, kind: str, method: str, tmp_path: Path
) -> None:
    check(call(speculate, tmp_path, staging, method, **ENVIRONMENT), kind, method)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_an_engine_on_a_gpu_drafts_with_what_was_published(method: str, graphs: bool, tmp_path: Path) -> None:
    arguments = {"enforce_eager": not graphs, **ON_GPU}
    found = call(speculate, tmp_path, "device", method, arguments, timeout_s=380.0, **ENVIRONMENT)
    check(found, "DeviceStaging", method)


@pytest.mark.long
@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite", "deepseek_v3"])
@pytest.mark.parametrize(("staging", "kind"), [("host", "HostStaging"), ("device", "CpuShadowStaging")])
def test_multi_token_prediction_drafts_as_published(
    staging: str, kind: str, family: str, tmp_path: Path
) -> None:
    if AMX and family != "glm4_moe":
        pytest.skip("vLLM's AMX kernels for MLA drop what its reload fills")
    check_alone(call(speculate_alone, tmp_path, staging, family, {}, **ENVIRONMENT), kind)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize(("staging", "kind"), [("host", "HostStaging"), ("device", "DeviceStaging")])
def test_multi_token_prediction_on_a_gpu_drafts_as_published(
    staging: str, kind: str, family: str, quantization: str | None, tmp_path: Path
) -> None:
    arguments = {"dtype": "bfloat16", "quantization": quantization, **ON_GPU}
    found = call(speculate_alone, tmp_path, staging, family, arguments, timeout_s=380.0, **ENVIRONMENT)
    check_alone(found, kind)


def check_alone(found: dict[str, Any], kind: str) -> None:
    assert found.pop("staging") == kind
    assert found.pop("random") < 0.5
    assert found.pop("half refused").startswith("'model.layers.2.enorm.weight' is missing")
    assert found == dict.fromkeys(("both", "policy alone"), (True, 1.0))


def check(found: dict[str, Any], kind: str, method: str) -> None:
    """A draft model that equals the policy drafts what the policy samples: all is accepted."""
    refused = {step: found.pop(step) for step in list(found) if step.endswith(" refused")}
    assert found.pop("staging") == kind
    shares = {step: share for step, (greedy, share) in found.items() if greedy}
    assert shares.keys() == found.keys() and len(shares) == 5
    assert shares["policy alone"] == shares["refused"] < 0.5
    if method == "draft_model":
        assert shares["start"] == shares["both"] == shares["loaded"] == 1.0
    assert refused["width refused"].startswith("'drafter.NORM' must have shape [128], got [64]")
    assert refused["half refused"].startswith("'drafter.NORM' is missing")
    assert refused["unknown refused"].startswith("'drafter.other.weight' is not a tensor of this model")
    assert refused["nan refused"].startswith("'drafter.NORM' holds NaN")
