"""vLLM's sampling of drafted tokens on a CPU, as in a worker.

In a process of its own: a worker on a CPU replaces kernels, and torch's streams and events.
"""

from types import SimpleNamespace
from typing import Any

import torch
import vllm.v1.worker.worker_base  # noqa: F401 the plugin is for processes with a worker

from deployments.vllm_plugin import register

REQUESTS = 8000


def frequencies(logits: list[float], temperature: float, drafted: int) -> Any:
    """How often each token follows, float32 of numpy, where one token is drafted for each request."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import apply_sampling_constraints, rejection_sample

    torch.manual_seed(0)
    register()
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    sampling: Any = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.full((REQUESTS,), temperature),
        top_k=torch.full((REQUESTS,), len(logits) - 1, dtype=torch.int32),
        top_p=None,
        generators={},
    )
    ends = torch.arange(1, REQUESTS + 1, dtype=torch.int32)
    scaled = apply_sampling_constraints(torch.tensor(logits).repeat(REQUESTS, 1), ends, sampling)
    drafts = torch.full((REQUESTS,), drafted, dtype=torch.int32)
    bonus = torch.zeros(REQUESTS, 1, dtype=torch.int32)
    counts = [1] * REQUESTS
    chosen = rejection_sample(drafts, counts, 1, ends, None, scaled, bonus, sampling)[:, 0]
    return (torch.bincount(chosen, minlength=len(logits)) / REQUESTS).numpy()
