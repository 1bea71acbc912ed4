"""Works around a crash of vLLM 0.32 on CPUs: seeded requests whose prompt takes more than one step.

In each step of a prompt but the last, vLLM discards the sampled token and rewinds the request's generator by
CUDA's offset (`GPUModelRunner._bookkeeping_sync`). A CPU generator has none: `RuntimeError: CPU Generator
does not use offset` kills the engine. A commit with `kv_cache: recompute` turns all that a request has into a
prompt.

Here the request has no generator in such a step: nothing is drawn, and the output does not depend on
chunking.
"""

import sys
from typing import Any

import numpy as np


def install() -> None:
    """Does nothing in processes without a CPU worker."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and "vllm.v1.worker.worker_base" in sys.modules:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        CPUModelRunner.sample_tokens = sample_tokens


def sample_tokens(runner: Any, grammar_output: Any) -> Any:
    """Replaces vLLM's `CPUModelRunner.sample_tokens`."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    batch = runner.input_batch
    dropped = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
    unused = {index: batch.generators.pop(index) for index in dropped if index in batch.generators}
    try:
        return GPUModelRunner.sample_tokens(runner, grammar_output)
    finally:
        batch.generators.update(unused)
