"""TRL's GRPOTrainer in server mode, unchanged: weights over its own NCCL path, one update before each batch.

Trains all weights of a tiny model on the GPU that it sees, and saves what it has sent last.
"""

import json
import sys
import time

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

HALF = 130  # of the tiny model's 258 tokens


def low_tokens(completion_ids, **columns):
    """The share of tokens in the lower half of the vocabulary."""
    return [sum(token < HALF for token in ids) / max(len(ids), 1) for ids in completion_ids]


def main() -> None:
    options = json.loads(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(options["checkpoint"])
    trainer = GRPOTrainer(
        model=options["checkpoint"],
        reward_funcs=low_tokens,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [f"{number}" for number in range(1000)]}),
        args=GRPOConfig(
            output_dir=options["output"],
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=options["url"],
            vllm_group_port=options["group_port"],
            model_init_kwargs={"dtype": "bfloat16"},
            max_steps=options["steps"],
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            num_generations=8,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=1,
            max_completion_length=16,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            bf16=False,
            gradient_checkpointing=False,
        ),
    )
    sync, took = trainer.vllm_generation.sync_weights, []

    def timed() -> None:
        begin = time.perf_counter()
        sync()
        took.append(round(time.perf_counter() - begin, 4))

    trainer.vllm_generation.sync_weights = timed
    trainer.train()
    timed()  # what the last step has made
    trainer.model.save_pretrained(options["saved"])
    tokenizer.save_pretrained(options["saved"])
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"rewards": rewards, "sync_s": took}))


if __name__ == "__main__":
    main()
