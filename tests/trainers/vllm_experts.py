"""vLLM's log-probabilities of a mixture of experts, and the experts that its routers chose.

In a process of its own: vLLM's parallel state and current configuration are global.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.model_loader import get_model

from tests.deployments.weights.staging.families import init_parallel_state
from tests.trainers.vllm_eagle3 import attend


def scored(model: Path, scratch: Path, tokens: list[int]) -> tuple[Any, Any]:
    """Of all positions but the last one: the next token's log-probability [T - 1], and vLLM's numbers of
    experts [T - 1, layers, top_k], captured as it does for `enable_return_routed_experts`."""
    config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=512, enforce_eager=True
    ).create_engine_config()
    init_parallel_state(config, scratch, "gloo")
    Attention.forward = attend
    chosen: dict[int, Any] = {}
    with set_current_vllm_config(config), torch.inference_mode():
        engine = get_model(vllm_config=config)
        for module in engine.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(chosen.__setitem__, module.layer_id))
        with set_forward_context(None, config, num_tokens=len(tokens)):
            hidden = engine(torch.tensor(tokens), torch.arange(len(tokens)))
        logprobs = engine.compute_logits(hidden).float().log_softmax(-1)
        following = torch.tensor(tokens[1:])[:, None]
        ids = np.stack([chosen[layer].numpy() for layer in sorted(chosen)], axis=1)
        return logprobs[:-1].gather(1, following)[:, 0].numpy(), ids[:-1].astype(np.uint8)
