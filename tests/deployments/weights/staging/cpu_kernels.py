"""The kernels that vLLM multiplies with on a CPU; which one it takes depends on the CPU."""

import torch
from vllm import _custom_ops
from vllm.v1.attention import selector

AMX = torch.cpu._is_amx_tile_supported()


def has_onednn() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU; without, vLLM takes the kernels of torch."""
    try:
        _custom_ops.create_onednn_mm(torch.zeros(64, 64, dtype=torch.bfloat16).t(), 32)
    except RuntimeError:  # a CPU without AVX-512, as seen on an AMD EPYC
        return False
    return True


def use_kernels(kernels: str) -> None:
    """Let vLLM take these kernels, in this process.

    onednn: weights packed where only their address is to be seen. amx: weights packed into tensors, which
    closures and MLA's kernels hold. torch: weights as they are.
    """
    _custom_ops._supports_onednn = kernels != "torch"
    torch.cpu._is_amx_tile_supported = lambda: kernels == "amx"
    selector._cached_get_attn_backend.cache_clear()
