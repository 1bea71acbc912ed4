"""What vLLM's reload leaves out, found in models of its own layers' types."""

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from deployments.weights.staging.host import reload_refusal, replacing_all


def test_a_failed_reload_restores_the_kernels_of_experts_it_did_not_reach() -> None:
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


def test_a_reload_of_mla_packed_for_amx_is_refused() -> None:
    attention = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(attention)
    attention.is_amx_bmm_enabled = True
    assert "drop the weights of 'kv_b_proj'" in str(reload_refusal(attention))
    attention.is_amx_bmm_enabled = False
    assert reload_refusal(attention) is None
