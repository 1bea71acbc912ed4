"""vLLM's hidden states of a model and its EAGLE-3 drafter on the same checkpoints.

In a process of its own: vLLM's parallel state and current configuration are global.
"""

from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model

from tests.deployments.weights.staging.families import init_parallel_state


def drafted(model: Path, head: Path, scratch: Path, tokens: list[int]) -> Any:
    """The drafter's logits [T - 1, V] of each position but the last, float32 of numpy."""
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=64,
        dtype="float32",
        enforce_eager=True,
        speculative_config={"method": "eagle3", "model": str(head), "num_speculative_tokens": 1},
    ).create_engine_config()
    init_parallel_state(config, scratch, "gloo")
    Attention.forward = attend
    positions = torch.arange(len(tokens))
    drafter_config = config.speculative_config.draft_model_config
    with set_current_vllm_config(config), torch.inference_mode():
        target = get_model(vllm_config=config)
        drafter = get_model(vllm_config=config, model_config=drafter_config)
        drafter.model.embed_tokens = target.model.embed_tokens  # as its proposer does
        ids, described = "eagle_aux_hidden_state_layer_ids", drafter_config.hf_config
        nested = (getattr(described, "eagle_config", None) or {}).get(ids)
        layers = getattr(described, ids, None) or nested
        target.set_aux_hidden_state_layers(layers or target.get_eagle3_default_aux_hidden_state_layers())
        _, hidden = target(torch.tensor(tokens), positions)
        fused = drafter.combine_hidden_states(torch.cat(hidden, dim=-1))
        made, _ = drafter(torch.tensor(tokens[1:]), positions[:-1], fused[:-1])
        return drafter.compute_logits(made).numpy()


def attend(
    self: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    """Causal attention of one sequence, without a KV cache."""
    q, k, v = (each.view(len(each), -1, self.head_size).transpose(0, 1) for each in (query, key, value))
    made = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=self.impl.scale, enable_gqa=True
    )
    return made.transpose(0, 1).flatten(1)
