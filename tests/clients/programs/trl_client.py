"""The calls of TRL's `VLLMClient`, with which GRPOTrainer and RLOOTrainer generate in server mode."""

import json
import sys

from trl.generation.vllm_client import VLLMClient

options = json.loads(sys.argv[1])
client = VLLMClient(base_url=options["url"], connection_timeout=30)
info = client.get_server_info()
generated = client.generate(options["prompts"], max_tokens=6, temperature=0.0, logprobs=0)
sampled = client.generate(options["prompts"], n=2, max_tokens=6)
hello, again = ([{"role": "user", "content": text}] for text in ("hello", "again"))
chatted = client.chat([hello, again], max_tokens=4, temperature=0.0)
client.reset_prefix_cache()

print(
    json.dumps(
        {
            "model": client.model,
            "world_size": client.get_world_size(),
            "logprobs_mode": info["model_config"]["logprobs_mode"],
            "backend": info["weight_transfer_config"]["backend"],
            "prompt_ids": generated["prompt_ids"],
            "completion_ids": generated["completion_ids"],
            "logprobs": generated["logprobs"],
            "sampled": sampled["completion_ids"],
            "chatted": chatted["completion_ids"],
        }
    )
)
