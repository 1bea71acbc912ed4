"""How many tokens an engine on a CPU computes in one step.

All requests of an engine wait for its step, also one that needs a single token. vLLM allows 2048 tokens of
prompts in it, which are milliseconds on a GPU. On two cores they are 2.3 s for a model of 135M, so a request
of 8 tokens waits for half a minute while prompts of others come in, or are computed again after an update.
Products of 256 rows use the cores as well as products of 2048 do (benchmarks/RESULTS.md).
"""

import os

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

LEAST_TOKENS = 256
TOKENS_PER_THREAD = 128

Defaults = dict[UsageContext | None, int]


class FleetEngineArgs(AsyncEngineArgs):
    """vLLM's, with another default of `max_num_batched_tokens` on a CPU."""

    def get_batch_defaults(self, world_size: int) -> tuple[Defaults, Defaults]:
        tokens, sequences = super().get_batch_defaults(world_size)
        if current_platform.is_cpu():
            threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
            limit = max(step_tokens(threads), self.max_num_seqs or 0)  # a step has one token of each at least
            tokens = {context: min(count, limit) for context, count in tokens.items()}
        return tokens, sequences


def step_tokens(threads: int) -> int:
    """The most tokens of a step for an engine of so many threads."""
    return max(LEAST_TOKENS, TOKENS_PER_THREAD * threads)
