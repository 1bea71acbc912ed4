"""What one optimizer step costs on a GPU, beside the step that one would write in thirty lines.

    python -m benchmarks.models 1.7b /tmp/m17 --seed 0
    python -m benchmarks.training /tmp/m17
    python -m benchmarks.training /tmp/m17 --prompt 2048 --variants plain packed+compiled
    python -m benchmarks.training --device cpu smollm2-135m --prompts 2 --answers 4 --prompt 64 --answer 64 \\
        --variants plain float32

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.training /tmp/m8 --budget 5120 \\
        --rows 2 --variants packed+compiled+checkpointed+fsdp2 trl+liger+fsdp2

*plain* is a loop over rows of equal length: float32 parameters, autocast to bfloat16, each layer
checkpointed, log-probabilities of 128 columns at a time, AdamW fused. The others are `Learner.step` with the
named settings of the trainer; *float32* is none of them. All take the same tokens, once to warm up and to
compile, then `--steps` times. *trl* is the step of TRL's GRPOTrainer, *trl+liger* the same with liger-kernel;
both need `trl`. Of either, *lora* is an adapter over a base in bfloat16 (TRL's by peft), *fsdp2* the model
sharded over the processes that `torch.distributed.run` has started (TRL's by accelerate), which share the
tokens. Of ours, *drafter* trains an EAGLE-3 head beside the policy.

Tokens are those of prompts and answers as if each answer were read with its own prompt. The share of the
devices' bfloat16 peak is that of 6 operations a parameter and token, of 4 with *lora*, attention not counted.
The memory is rank 0's. The losses of *plain* and of the others are not the same function.
"""

import argparse
import gc
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.settings.models import resolve_model
from trainers.eagle3 import write_new_head
from trainers.fsdp2 import empty_model, mesh_of_all_ranks
from trainers.learner import Learner
from trainers.settings import DrafterConfig, LearnerConfig, LoraConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import Trajectory

PEAK = 989e12  # dense bfloat16 operations a second of an H100 or H200, from the data sheet
RATE = 1e-6
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
COLUMNS = 128
HEAD = """{}, {:.2f} B parameters, {} answers, {} tokens

| variant | step (s) | first step (s) | tokens/s | of peak | memory (GiB) | losses | gradient norm |
|---|---|---|---|---|---|---|---|"""
LORA = LoraConfig(name="benchmark", rank=32)
SETTINGS = {
    "mixed": {"compute_dtype": "bfloat16"},
    "checkpointed": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": "selective"},
    "packed": {"compute_dtype": "bfloat16", "packed": True},
    "compiled": {"compile_layers": True},
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"dtype": "bfloat16"},
    "fsdp2": {},
    "drafter": {},
}
DRAFT_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Result:
    """Of the steps of a variant; memory is the largest that was allocated, in bytes."""

    seconds: float
    first_s: float
    memory: int
    losses: tuple[float, float]
    grad_norm: float


def trajectories(options: argparse.Namespace) -> list[Trajectory]:
    """Random answers; with `--ragged` of lengths from an eighth of the longest to the longest."""
    generator = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(100, options.tokens) for _ in range(count))

    made = []
    for _ in range(options.prompts):
        prompt = tokens(options.prompt)
        for number in range(options.answers):
            length = (
                generator.randint(options.answer // 8, options.answer) if options.ragged else options.answer
            )
            made.append(
                Trajectory(
                    prompt_token_ids=prompt,
                    token_ids=tokens(length),
                    logprobs=(-12.0,) * length,
                    advantage=1.0 if number % 2 else -1.0,
                    weight_versions=(),
                )
            )
    return made


def plain(options: argparse.Namespace, batch: Sequence[Trajectory]) -> Callable[[], dict[str, float]]:
    """The step of a script: REINFORCE on padded rows."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.to(options.device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    head = model.get_output_embeddings()
    total = sum(len(each.token_ids) for each in batch)
    ordered = sorted(batch, key=lambda each: len(each.token_ids))

    def logprobs(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return head(hidden).float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    def step() -> dict[str, float]:
        losses = []
        for first in range(0, len(ordered), options.rows):
            part = ordered[first : first + options.rows]
            longest = max(len(each.token_ids) for each in part)
            rows = [each.prompt_token_ids + each.token_ids for each in part]
            ids = torch.tensor([row + (0,) * (options.prompt + longest - len(row)) for row in rows])
            weights = torch.zeros(len(part), longest)
            for row, each in zip(weights, part, strict=True):
                row[: len(each.token_ids)] = each.advantage / total
            ids, weights = ids.to(options.device), weights.to(options.device)
            with torch.autocast(options.device, torch.bfloat16):
                hidden = model.base_model(ids, use_cache=False).last_hidden_state[:, options.prompt - 1 : -1]
                targets = ids[:, options.prompt :]
                parts = zip(hidden.split(COLUMNS, 1), targets.split(COLUMNS, 1), strict=True)
                scores = [checkpoint(logprobs, *each, use_reentrant=False) for each in parts]
            loss = -(torch.cat(scores, 1) * weights).sum()
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": float(sum(losses)), "grad_norm": float(norm)}

    return step


def ours(
    options: argparse.Namespace, batch: Sequence[Trajectory], variant: str
) -> Callable[[], dict[str, Any]]:
    """`Learner.step` with the settings that the variant's name lists."""
    settings: dict[str, Any] = {}
    for name in variant.split("+"):
        settings |= SETTINGS[name]
    torch.set_float32_matmul_precision("high" if settings.get("compute_dtype") else "highest")
    mesh = None
    if "fsdp2" in variant:
        join_ranks(options.device)
        mesh = mesh_of_all_ranks(options.device)
    policy = TrainedPolicy.load(options.model, device=options.device, mesh=mesh, **settings)
    if "lora" in variant:
        policy.adapt(LORA, seed=0)
    if "drafter" in variant:
        with tempfile.TemporaryDirectory() as root:
            write_new_head(options.model, Path(root) / "head", draft_vocabulary=DRAFT_VOCABULARY)
            policy.attach_drafter(DrafterConfig(model=f"{root}/head"))
    config = LearnerConfig(
        optimizer=OptimizerConfig(learning_rate=RATE), max_tokens_per_microbatch=options.budget
    )
    learner = Learner(policy, config)
    return lambda: learner.step(batch)


def measure(options: argparse.Namespace, batch: Sequence[Trajectory], variant: str) -> Result:
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if variant.startswith("trl"):
        from benchmarks.training_trl import train

        lora = LORA if "lora" in variant else None
        seconds, logged = train(options, batch, liger="liger" in variant, lora=lora, rate=RATE)
    else:
        step = plain(options, batch) if variant == "plain" else ours(options, batch, variant)
        seconds, logged = [], []
        for _ in range(1 + options.steps):
            began = time.perf_counter()
            logged.append(step())
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        if options.profile:
            with torch.profiler.profile() as profile:
                step()
            order = f"self_{'device' if on_gpu else 'cpu'}_time_total"
            table = profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60)
            print(table, file=sys.stderr)
    return Result(
        seconds=statistics.median(seconds[1:]),
        first_s=seconds[0],
        memory=torch.cuda.max_memory_allocated() if on_gpu else 0,
        losses=(logged[0]["loss"], logged[-1]["loss"]),
        grad_norm=logged[-1]["grad_norm"],
    )


def join_ranks(device: str) -> None:
    """TRL joins them itself."""
    if dist.is_initialized():
        return
    if RANKS == 1:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


def table_row(variant: str, made: Result, parameters: int, tokens: int) -> str:
    work = (4 if "lora" in variant else 6) * parameters * tokens
    return (
        f"| {variant} | {made.seconds:.2f} | {made.first_s:.1f} | {tokens / made.seconds:.0f} | "
        f"{work / made.seconds / PEAK / RANKS:.1%} | {made.memory / 2**30:.1f} | "
        f"{made.losses[0]:.6f}, {made.losses[1]:.6f} | {made.grad_norm:.4f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a built-in model, or a directory")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--answer", type=int, default=1024, help="tokens")
    parser.add_argument("--ragged", action="store_true", help="answers of different lengths")
    parser.add_argument("--rows", type=int, default=8, help="plain: of one forward pass")
    parser.add_argument("--budget", type=int, default=10_240, help="ours: max_tokens_per_microbatch")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[
            "plain",
            "mixed",
            "mixed+checkpointed",
            "packed",
            "packed+compiled",
            "packed+compiled+checkpointed",
        ],
        help=f"plain, trl (and +liger, +lora, +fsdp2), or names of {', '.join(SETTINGS)} joined by +",
    )
    options = parser.parse_args()
    options.model = Path(resolve_model(options.model))
    is_first = os.environ.get("RANK", "0") == "0"
    model = empty_model(options.model)
    parameters, options.tokens = sum(each.numel() for each in model.parameters()), model.config.vocab_size
    batch = trajectories(options)
    tokens = sum(len(each.prompt_token_ids) + len(each.token_ids) for each in batch)
    if is_first:
        print(HEAD.format(options.model.name, parameters / 1e9, len(batch), tokens), flush=True)
    for variant in options.variants:
        try:
            made = measure(options, batch, variant)
        except Exception as error:
            traceback.print_exc()
            row = f"| {variant} | {type(error).__name__}: {str(error)[:100]} |"
        else:
            row = table_row(variant, made, parameters, tokens)
        if is_first:
            print(row, flush=True)
        torch._dynamo.reset()
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
