"""The optimizer step of TRL's GRPOTrainer on given answers: its own training loop, without generation."""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from trainers.settings import LoraConfig
from trainers.trajectory import Trajectory


def train(
    options: argparse.Namespace,
    batch: Sequence[Trajectory],
    *,
    liger: bool,
    lora: LoraConfig | None,
    rate: float,
) -> tuple[list[float], list[dict[str, float]]]:
    """Train as TRL does on a GPU: float32 parameters, autocast to bfloat16, checkpointed layers.

    Of several processes each takes its part of the rows, and has a shard of the model (FSDP2 by accelerate).

    Args:
        lora: train an adapter over a base in bfloat16.

    Returns:
        the seconds of each step, and what TRL logged of it.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if options.device == "cuda":  # TRL selects it later, but the rows are put on it here
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rows = min(options.rows, len(batch) // ranks)
    micro_batches = [
        _inputs(batch[first : first + rows], len(batch), options.device)
        for first in range(rank * rows, len(batch), rows * ranks)
    ]
    times: list[float] = []
    logs: list[dict[str, float]] = []

    class Given(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            self._given = getattr(self, "_given", -1) + 1
            return dict(micro_batches[self._given % len(micro_batches)])

        def log(self, given: dict[str, float], *arguments: Any, **named: Any) -> None:
            if "grad_norm" in given:
                logs.append(given)

    class Times(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            if options.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - self.began)

    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            bf16=True,
            use_cpu=options.device == "cpu",
            gradient_checkpointing=True,
            optim="adamw_torch_fused",
            learning_rate=rate,
            lr_scheduler_type="constant",
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=len(micro_batches),
            num_generations=rows,
            max_completion_length=options.answer,
            beta=0.0,
            use_liger_kernel=liger,
            max_steps=1 + options.steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **({"fsdp": True, "fsdp_config": {"reshard_after_forward": True}} if ranks > 1 else {}),
        )
        trainer = Given(
            model=AutoModelForCausalLM.from_pretrained(
                options.model, dtype=torch.float32 if lora is None else torch.bfloat16
            ),
            peft_config=None if lora is None else _adapter(lora),
            args=config,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            # Made so, it needs no fingerprint, which datasets makes with a pickle that some pyarrow refuse.
            train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": ["-"] * 64}), fingerprint="given"),
            processing_class=_tokenizer(),
            callbacks=[Times()],
        )
        trainer.train()
    return times, logs


def _inputs(part: Sequence[Trajectory], answers: int, device: str) -> dict[str, torch.Tensor]:
    """Padded rows, as TRL makes them: prompts on their left, answers on their right."""
    before = max(len(each.prompt_token_ids) for each in part)
    after = max(len(each.token_ids) for each in part)
    prompts = [(0,) * (before - len(each.prompt_token_ids)) + each.prompt_token_ids for each in part]
    completions = [each.token_ids + (0,) * (after - len(each.token_ids)) for each in part]
    read = [[int(place >= before - len(each.prompt_token_ids)) for place in range(before)] for each in part]
    learned = [[int(place < len(each.token_ids)) for place in range(after)] for each in part]
    made = {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.tensor(read),
        "completion_ids": torch.tensor(completions),
        "completion_mask": torch.tensor(learned),
        "advantages": torch.tensor([each.advantage for each in part]),
        "old_per_token_logps": None,
        # Of all micro-batches, by which TRL divides.
        "num_items_in_batch": torch.tensor(sum(map(sum, learned)) * answers // len(part)),
    }
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in made.items()
    }


def _adapter(lora: LoraConfig) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM")


def _tokenizer() -> PreTrainedTokenizerFast:
    """TRL asks for one, for prompts that are not used here."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
