"""TRL's AsyncGRPO trains a LoRA adapter against the fleet, on a CPU.

Two things are not TRL's. Its attention over packed samples is a CUDA kernel from a hub; `varlen_attention`
computes the same with torch's scaled dot product. And it asks the GPU for its peak, to report the use that
it makes of it. Everything else runs as in TRL's own documentation.
"""

import json
import sys
from types import SimpleNamespace

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

PLAIN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {"content": {"close_pattern": "<eos>", "content": "text"}},
}
HALF = 130  # of the tiny model's 258 tokens


def varlen_attention(
    query, key, value, query_ends, key_ends, longest_query, longest_key, *, softmax_scale, **options
):
    """Of each segment to its path, which ends with it: [tokens, heads, width]."""
    assert options.pop("causal") and options.pop("window_size") == (-1, -1) and not options
    out = torch.empty_like(query)
    for q, q_end, k, k_end in zip(query_ends, query_ends[1:], key_ends, key_ends[1:], strict=False):
        mine, count = query[q:q_end], k_end - k
        seen = torch.ones(len(mine), count, dtype=torch.bool).tril(count - len(mine))
        out[q:q_end] = torch.nn.functional.scaled_dot_product_attention(
            mine.transpose(0, 1),
            key[k:k_end].transpose(0, 1),
            value[k:k_end].transpose(0, 1),
            attn_mask=seen,
            scale=softmax_scale,
            enable_gqa=True,
        ).transpose(0, 1)
    return out


def low_tokens(completion_ids, **columns):
    """The share of tokens in the lower half of the vocabulary."""
    return [sum(token < HALF for token in ids) / max(len(ids), 1) for ids in completion_ids]


def main() -> None:
    options = json.loads(sys.argv[1])
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *arguments: None
    tokenizer = AutoTokenizer.from_pretrained(options["checkpoint"])
    tokenizer.response_template = PLAIN  # TRL knows those of real models by their chat templates
    prompts = [[{"role": "user", "content": f"{number}"}] for number in range(1000)]
    trainer = AsyncGRPOTrainer(
        model=options["checkpoint"],
        reward_funcs=low_tokens,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]),
        args=AsyncGRPOConfig(
            output_dir=options["output"],
            vllm_server_base_url=options["url"],
            max_steps=options["steps"],
            learning_rate=5e-2,
            num_generations=8,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            max_completion_length=16,
            max_staleness=options["max_staleness"],
            max_inflight_tasks=16,
            token_budget=512,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    print(
        json.dumps(
            {
                "rewards": [entry["reward"] for entry in history],
                "sync_s": [entry.get("perf/weight_sync_s") for entry in history],
                "version": trainer.model_version,
                "adapter_only": trainer._lora_sync,
            }
        )
    )


if __name__ == "__main__":
    main()
