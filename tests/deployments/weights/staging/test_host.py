"""A model that staging in host memory swapped is what a fresh load of the same version is."""

import pytest
import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from deployments.weights.staging.host import replacing_all
from tests.deployments.weights.staging.family_results import KERNELS, ONCE, Results, family_results

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=KERNELS)
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    return family_results(tmp_path_factory.mktemp("host"), "host", request.param)


@pytest.mark.parametrize("family", ["experts", "padded-experts", "dense", "mla", "tied", "tied-twice"])
def test_all_that_was_loaded_is_replaced_by_each_swap(family: str, found: Results) -> None:
    assert found[family].get("behind") == [[], []], found[family]


@ONCE
def test_all_weights_of_modules_that_lora_wraps_are_replaced(found: Results) -> None:
    assert found["dense-lora"].get("behind") == [[], []], found["dense-lora"]


@ONCE
def test_an_output_embedding_that_the_engine_has_tied_may_not_differ_later(found: Results) -> None:
    assert "'lm_head.weight' must be equal to the input embeddings" in found["tied-twice"]["refused"]


@ONCE
def test_a_model_that_vllm_would_leave_as_it_was_is_refused(found: Results) -> None:
    assert "GptOssForCausalLM copies weights past its loaders" in found["gpt-oss"]["refused"]


def test_experts_that_a_failed_reload_did_not_come_to_have_their_kernels_again() -> None:
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    kernel = torch.nn.Identity()
    method.unquantized_backend, method.moe_kernel = UnquantizedMoeBackend.CPU, kernel
    model = torch.nn.Module()
    model.quant_method = method
    with pytest.raises(OSError, match="cannot be read"), replacing_all(model):
        assert method.moe_kernel is None
        raise OSError("the file cannot be read")
    assert method.moe_kernel is kernel


@ONCE
def test_experts_that_lora_wraps_are_not_replaced_in_silence(found: Results) -> None:
    assert "keeps the former weights of experts that LoRA wraps" in found["experts-lora"]["refused"]
