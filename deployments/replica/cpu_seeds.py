"""Requests with a seed on a CPU, whose prompts take more than one step: vLLM 0.32 ends the engine under them.

In each step of a prompt but the last, vLLM samples a token, drops it, and turns the request's generator of
random numbers back by what CUDA's takes for a token. A CPU's cannot be turned back so: `RuntimeError: CPU
Generator does not use offset`, and the engine is dead, with all its requests
(`GPUModelRunner._bookkeeping_sync`; vllm-rbln 1025 and vllm-qaic 92 found the same). An update with
`kv_cache: recompute` makes a prompt of all that a request has.

Here a request has no generator in a step whose token is dropped: nothing is drawn from it, and its answer is
the same in however many steps its prompt was computed.
"""

import sys
from typing import Any

import numpy as np


def install() -> None:
    """Called in every process that vLLM starts; does nothing in those that have no worker on a CPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and "vllm.v1.worker.worker_base" in sys.modules:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        CPUModelRunner.sample_tokens = sample_tokens


def sample_tokens(runner: Any, grammar_output: Any) -> Any:
    """vLLM's, of a model runner."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    batch = runner.input_batch
    dropped = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
    unused = {index: batch.generators.pop(index) for index in dropped if index in batch.generators}
    try:
        return GPUModelRunner.sample_tokens(runner, grammar_output)
    finally:
        batch.generators.update(unused)
