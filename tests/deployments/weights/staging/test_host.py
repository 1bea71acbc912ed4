"""What vLLM's reload leaves out, found in models of its own layers' types."""

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import ColumnParallelLinear, UnquantizedLinearMethod

from deployments.weights.staging.host import lacking, make_reloadable, reload_refusal, replacing_all


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


def model(*, amx: bool = True, method: object | None = None) -> torch.nn.Module:
    """One layer, as vLLM leaves it: the projection's weight is gone."""
    projection = ColumnParallelLinear.__new__(ColumnParallelLinear)
    attention = MLAAttention.__new__(MLAAttention)
    for each in (projection, attention):
        torch.nn.Module.__init__(each)
    projection.output_size_per_partition, projection.input_size_per_partition = 6, 4
    projection.params_dtype = torch.bfloat16
    projection.quant_method = method or UnquantizedLinearMethod()
    projection.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    attention.is_amx_bmm_enabled, attention.kv_b_proj = amx, projection
    found = torch.nn.Module()
    found.layers = torch.nn.ModuleList([torch.nn.Module()])
    found.layers[0].kv_b_proj, found.layers[0].attention = projection, attention
    return found


def test_a_projection_gets_memory_that_does_not_look_like_weights() -> None:
    one = model()
    make_reloadable(one)
    weight = one.layers[0].kv_b_proj.weight
    assert (tuple(weight.shape), weight.dtype) == ((6, 4), torch.bfloat16)
    assert weight.isnan().all()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.0.kv_b_proj.weight"], []),
        (["language_model.model.layers.0.kv_b_proj.weight"], []),
        (["layers.10.kv_b_proj.weight", "layers.0.kv_b_proj.bias"], ["layers.0.kv_b_proj.weight"]),
        ([], ["layers.0.kv_b_proj.weight"]),
    ],
)
def test_missing_amx_projections_are_named(names: list[str], expected: list[str]) -> None:
    assert lacking(model(), names) == expected


def test_quantized_weights_cannot_be_reloaded() -> None:
    assert "nothing that its reload could fill of layers.0.kv_b_proj" in str(
        reload_refusal(model(method=object()))
    )
    assert reload_refusal(model()) is None


def test_other_kernels_keep_the_weight() -> None:
    other = model(amx=False, method=object())
    make_reloadable(other)
    assert other.layers[0].kv_b_proj.weight.numel() == 0
    assert (lacking(other, []), reload_refusal(other)) == ([], None)
