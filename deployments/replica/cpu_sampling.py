"""Works around three faults of vLLM 0.32 on CPUs. The first two kill engines.

Seeded requests whose prompt takes more than one step: in each step but the last, vLLM rewinds the request's
generator by CUDA's offset (`GPUModelRunner._bookkeeping_sync`), which a CPU generator lacks. A commit with
`kv_cache: recompute` makes prompts of all running requests. Such a step gets no generator here: nothing is
drawn.

The first log-probabilities: vLLM compiles one comparison (`batched_count_greater_than`) to save a GPU memory.
That took 17 s of two busy cores, without requests running, and the compiler has failed. It is not compiled
here.

Speculative decoding of sampled requests: the kernel that expands `temperature`, `top_k` and `top_p` to
drafted tokens fills a copy of what is not int64. Tokens were sampled with uninitialized values. Here it fills
its output.
"""

import sys
from typing import Any

import numpy as np
import torch


def install() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and "vllm.v1.worker.worker_base" in sys.modules:
        from vllm.utils import cpu_triton_utils
        from vllm.v1.sample import sampler
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        counting: Any = sampler.batched_count_greater_than
        plain = getattr(counting, "_torchdynamo_orig_callable", counting)
        sampler.batched_count_greater_than = plain
        cpu_triton_utils._expand_kernel_impl = expand
        CPUModelRunner.sample_tokens = sample_tokens


def sample_tokens(runner: Any, grammar_output: Any) -> Any:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    batch = runner.input_batch
    dropped = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
    unused = {index: batch.generators.pop(index) for index in dropped if index in batch.generators}
    try:
        return GPUModelRunner.sample_tokens(runner, grammar_output)
    finally:
        batch.generators.update(unused)


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value [R] per token into `output`; `cu_num_tokens` are sums [R]."""
    values = torch.where(input_val == replace_from, replace_to, input_val)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    expanded = values.repeat_interleave(counts)
    output[: len(expanded)] = expanded
