"""TRL's part of `benchmarks.run`: GRPOTrainer or AsyncGRPO on the recipe, with a record of its steps.

    python -m benchmarks.run_trl JSON      # made by benchmarks.run

AsyncGRPO's attention over packed answers is a kernel from a hub that a machine without a network cannot
reach. On a GPU torch's own FlashAttention takes its place, after a comparison with what runs on a CPU.
A CPU has no NCCL: in server mode no weights are sent there, which only shows that the programs run.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback

from benchmarks.recipe import Recipe, Step, problems, rewards

ANSWER = {  # how TRL finds what the assistant says in the tokens of a chat
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": "<|im_end|>", "content": "text"}},
}


class Record(TrainerCallback):
    """Appends a line for each step."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self._path, self._recipe, self._done = path, recipe, 0
        self.update_s = 0.0  # since the last step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        if "reward" not in logs or state.global_step <= self._done:
            return
        self._done = state.global_step
        learned = logs.get("batch/trained_tokens_per_step")
        if learned is None:
            learned = logs["completions/mean_length"] * self._recipe.groups * self._recipe.answers
        Step(
            step=state.global_step,
            ended=time.time(),
            reward=logs["reward"],
            tokens=learned,
            staleness=logs.get("sample/staleness_mean") or 0.0,
            dropped=logs.get("sample/dropped_stale_total") or 0.0,
            update_s=logs.get("perf/weight_sync_s") or self.update_s,
            wait_s=logs.get("perf/rollout_wait_s"),
        ).append(self._path)
        self.update_s = 0.0


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    softmax_scale: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """Of each segment to its path, which ends with it: [tokens, heads, width]."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    ends, limits = (query_ends, key_ends), (longest_query, longest_key)
    if query.is_cuda:
        made = torch.ops.aten._flash_attention_forward(
            query, key, value, *ends, *map(int, limits), 0.0, True, False, scale=softmax_scale
        )
        return made[0]
    out = []
    for q, q_end, k, k_end in zip(query_ends, query_ends[1:], key_ends, key_ends[1:], strict=False):
        mine, paths = query[q:q_end], (key[k:k_end], value[k:k_end])
        seen = torch.ones(len(mine), len(paths[0]), dtype=torch.bool, device=mine.device)
        seen = seen.tril(len(paths[0]) - len(mine))
        parts = [each.transpose(0, 1) for each in (mine, *paths)]
        made = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, scale=softmax_scale)
        out.append(made.transpose(0, 1))
    return torch.cat(out)


def check_attention() -> None:
    """Raises AssertionError if FlashAttention computes something else than `attend` does on a CPU."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(40, heads, 64, requires_grad=True) for heads in (9, 3, 3))
    ends = [torch.tensor(each, dtype=torch.int32) for each in ([0, 10, 17, 40], [0, 10, 27, 60])]
    paths = torch.tensor([*range(10), *range(17), *range(7, 40)])
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        given = [each.to(device, dtype) for each in (query, key[paths], value[paths])]
        out = attend(*given, *(each.to(device) for each in ends), 23, 33).float().cpu()
        found.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.1, rtol=0.05)


def made_dataset(recipe: Recipe) -> Any:
    from datasets import Dataset
    from datasets.table import InMemoryTable

    entries = problems(recipe.seed)
    columns = {
        "prompt": [each["messages"] for each in entries],
        "answer": [each["answer"] for each in entries],
    }
    # Made so, it needs no fingerprint, which datasets makes with a pickle that some pyarrow refuse.
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint="recipe")


def tokenizer_of(recipe: Recipe) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    tokenizer.response_template = ANSWER
    return tokenizer


def shared(recipe: Recipe, output: str) -> dict[str, Any]:
    """Arguments that both of TRL's trainers take."""
    on_gpu = recipe.device == "cuda"
    return {
        "output_dir": output,
        "max_steps": recipe.steps,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "constant",
        "num_generations": recipe.answers,
        "max_completion_length": recipe.max_tokens,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "seed": recipe.seed,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
    }


def grpo(recipe: Recipe, record: Record, url: str | None, output: str) -> Any:
    """GRPOTrainer: in server mode with a URL, else with an engine in its own process."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_client import VLLMClient

    from deployments.trainer.fleet_connection import free_port

    if recipe.device == "cpu":
        for name in ("init_communicator", "update_named_params"):
            setattr(VLLMClient, name, lambda *arguments, **named: None)
    where: dict[str, Any] = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    if url is not None:
        where = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": free_port()}
    trainer = GRPOTrainer(
        model=recipe.model,
        reward_funcs=rewards,
        processing_class=tokenizer_of(recipe),
        train_dataset=made_dataset(recipe),
        callbacks=[record],
        args=GRPOConfig(
            **shared(recipe, output),
            **where,
            use_vllm=True,
            vllm_max_model_length=1024,
            per_device_train_batch_size=recipe.groups * recipe.answers,
            gradient_accumulation_steps=1,
        ),
    )
    sync = trainer.vllm_generation.sync_weights

    def timed() -> None:
        began = time.perf_counter()
        sync()
        record.update_s += time.perf_counter() - began

    trainer.vllm_generation.sync_weights = timed
    return trainer


def async_grpo(recipe: Recipe, record: Record, url: str, output: str) -> Any:
    """AsyncGRPO; on a CPU it trains an adapter, which is sent as files."""
    from peft import LoraConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    peft = None
    if recipe.device == "cpu":
        async_grpo_trainer.get_peak_flops_per_device = lambda *arguments: None
        peft = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    else:
        check_attention()
    return AsyncGRPOTrainer(
        model=recipe.model,
        reward_funcs=rewards,
        processing_class=tokenizer_of(recipe),
        train_dataset=made_dataset(recipe),
        callbacks=[record],
        peft_config=peft,
        args=AsyncGRPOConfig(
            **shared(recipe, output),
            vllm_server_base_url=url,
            max_staleness=recipe.max_staleness,
            queue_maxsize=recipe.max_staleness * recipe.groups * recipe.answers,  # more would be too stale
            token_budget=-1,  # the whole batch at once
            per_device_train_batch_size=recipe.groups * recipe.answers,
            gradient_accumulation_steps=1,
        ),
    )


def main() -> None:
    options = json.loads(sys.argv[1])
    recipe = Recipe(**options["recipe"])
    root = Path(options["root"])
    record = Record(root / "steps.jsonl", recipe)
    make = async_grpo if options["program"] == "trl-async" else grpo
    trainer = make(recipe, record, options["url"], str(root / "output"))
    (root / "began").touch()
    trainer.train()


if __name__ == "__main__":
    main()
