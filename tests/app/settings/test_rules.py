"""What a wrong configuration is told."""

import re

import pytest
import yaml
from pydantic import ValidationError

from app.settings.config import AppConfig
from tests.app.settings.complaints import COLOCATED, SEPARATE, complaint

BASES = {"colocated": COLOCATED, "separate": SEPARATE}
# Settings beside `model: m`, over those of a base if one is named, and the sentence about them.
RULES = """
weights: {transport: nccl}
  'weights.transport': expected 'shm' or 'gloo' with device 'cpu', got 'nccl' ('nccl' connects processes on
  device 'cuda')
weights: {staging: none}
  'weights.staging': expected 'host' with transport 'shm', got 'none' ('none' selects vLLM's own engines,
  which are 'ipc' or 'nccl')
store: {shared: false}, engine: {extra: {enable_lora: true, max_loras: 2}}
  'store.shared': expected true with 'engine.extra.enable_lora', got false (adapters are there)
store: {shared: false}, engine: {extra: {speculative_config: {model: m}}}
  'store.shared': expected true with a drafter that has a checkpoint, got false (a version without a new
  drafter has that of the version before)
weights: {wire: vllm}
  'weights.wire': expected 'slipstream' with transport 'shm', got 'vllm' (vLLM's own trainer engines are
  'ipc' or 'nccl')
device: cuda, weights: {transport: nccl, wire: vllm}
  'weights.staging': expected 'device' or 'none' with wire 'vllm', got 'host' (with a GPU to receive on, a
  version is staged there)
separate | weights: {transport: nccl, staging: host, keep_published: device}
  'weights.keep_published': expected null without transport 'nccl' and staging 'device', got 'device' (workers
  restore the last version from their shadows)
separate | weights: {transport: nccl, staging: device, wire: vllm}
  'weights.wire': expected 'slipstream' with a trainer, got 'vllm' (the trainer deployment states digests,
  which vLLM's wire cannot carry)
engine: {extra: {enable_sleep_mode: true}}
  'engine.extra.enable_sleep_mode': expected false with device 'cpu', got true (sleep releases GPU memory)
trainer: {packed: true}
  'trainer.packed': expected false with device 'cpu', got true (FlexAttention has no backward pass there)
placement: colocated, trainer: {strategy: fsdp2, world_size: 2}
  'placement': expected 'separate' with device 'cpu', got 'colocated' (there is no GPU to share)
weights: {min_replicas: 3}
  'weights.min_replicas': expected at most 2, got 3 ('engine.num_replicas' is 2)
engine: {extra: {dtype: x}}
  'engine.extra.dtype': set 'engine.dtype' instead (every setting has one name)
engine: {extra: {ec_transfer_config: {ec_connector: ECExampleConnector}}}
  'engine.extra.ec_transfer_config': expected none, got one (an update cannot drop encoder outputs that are
  cached outside the engine)
device: cuda, weights: {transport: nccl, staging: device}, engine: {extra: {enable_lora: true}}
  'weights.staging': expected 'host' with 'engine.extra.enable_lora', got 'device' (LoRA wraps the modules
  that a shadow would copy)
engine: {env: {VLLM_API_KEY: x}}
  'engine.env.VLLM_API_KEY': set 'security.user_token_file' instead (every setting has one name)
engine: {extra: {enable_expert_parallel: true}}
  'engine.extra.enable_expert_parallel': expected more than one rank in a replica, or false, got true with
  1 rank (experts are distributed over the ranks of one replica)
colocated | engine: {gpus_per_rank: 0.7}
  'engine.gpus_per_rank + trainer.gpus_per_rank': expected at most 1, got 0.7 + 0.4 = 1.1 (an engine rank
  and a trainer rank share each GPU when colocated)
colocated | engine: {num_replicas: 3, gpus_per_rank: 0.5}
  'trainer.world_size': expected 3 with placement 'colocated', got 2 (one trainer rank on every GPU of the
  replicas: 3 replicas of 1)
colocated | weights: {transport: nccl, staging: device}
  'weights.transport': expected 'ipc' with placement 'colocated', got 'nccl' ('nccl' does not connect two
  processes on the same GPU)
colocated | placement: separate, weights: {transport: ipc, staging: none}, trainer: {}
  'placement': expected 'colocated' with vLLM's own 'ipc' engine and a trainer, got 'separate' (it connects
  only processes on the same GPU)
colocated | trainer: null
  'trainer': expected a trainer with placement 'colocated', got none (without a trainer nothing shares the
  GPUs)
separate | engine: {gpus_per_rank: 1.5}
  'engine.gpus_per_rank': expected less than or equal to 1, got 1.5
separate | engine: {tensor_parallel_size: 2, gpus_per_rank: 0.5}
  'engine.gpus_per_rank': expected 1 with placement 'separate', got 0.5 (2 ranks need a GPU each, and Ray
  could place fractions on the same one)
separate | trainer: {strategy: fsdp2, world_size: 4, gpus_per_rank: 0.25}
  'trainer.gpus_per_rank': expected 1 with placement 'separate', got 0.25 (4 ranks need a GPU each, and Ray
  could place fractions on the same one)
trainer: {lora: {name: math}}
  'engine.extra.enable_lora': expected true with 'trainer.lora', got false (replicas must be able to serve
  what the trainer publishes)
trainer: {lora: {name: math, rank: 32}}, engine: {extra: {enable_lora: true, max_loras: 2}}
  'trainer.lora.rank': expected at most 'engine.extra.max_lora_rank', 16, got 32 (a replica has capacity for
  no more)
trainer: {lora: {name: math}}, engine: {extra: {enable_lora: true}}
  'engine.extra.max_loras': expected at least 2 with 'trainer.lora', got 1 (requests of one version of the
  adapter end while those of the next begin)
trainer: {lora: {name: m}}, engine: {extra: {enable_lora: true, max_loras: 2}}
  'trainer.lora.name': expected 1 to 200 printable characters, not the model's own name, got 'm'
trainer: {lora: {rank: 8}}, engine: {extra: {enable_lora: true, max_loras: 2}}
  'trainer.lora.name': expected one for the adapter in the fleet, got none
trainer: {drafter: {model: /a}}
  'engine.extra.speculative_config.model': expected 'trainer.drafter.model', '/a', got none (engines draft
  with the head that is trained)
trainer: {drafter: {model: /a}}, engine: {extra: {speculative_config: {method: eagle3, model: /b}}}
  'engine.extra.speculative_config.model': expected 'trainer.drafter.model', '/a', got '/b' (engines draft
  with the head that is trained)
trainer: {drafter: {}}, engine: {extra: {speculative_config: {method: eagle3, model: /b}}}
  'engine.extra.speculative_config.method': expected 'mtp' with 'trainer.drafter' without a 'model', got
  'eagle3'
engine: {min_draft_acceptance: 0.1, extra: {speculative_config: {method: suffix}}}
  'engine.extra.speculative_config.method': expected 'ngram', 'eagle', 'eagle3', 'mtp' or 'draft_model' with
  'engine.min_draft_acceptance', got 'suffix' (with others vLLM can do no step without drafts)
engine: {min_draft_acceptance: 0.1, data_parallel_size: 2, extra: {speculative_config: {method: mtp}}}
  'engine.data_parallel_size': expected 1 with 'engine.min_draft_acceptance', got 2 (its ranks must draft
  the same number of tokens in each step)
engine: {min_draft_acceptance: 0.1, extra: {speculative_config: {method: mtp}, disable_log_stats: true}}
  'engine.extra.disable_log_stats': expected false with 'engine.min_draft_acceptance', got true (acceptance
  is known from vLLM's statistics)
separate | engine: {min_draft_acceptance: 0.1, extra: {speculative_config: {method: mtp}}}
  'engine.extra.speculative_config.num_speculative_tokens_per_batch_size': expected ranges of which one has 0
  drafts with 'engine.min_draft_acceptance', such as [[1, 255, 3], [256, 256, 0]], got none (vLLM captures no
  CUDA graphs of steps without drafts otherwise, which are slower then)
engine: {num_replicas: auto}
  'engine.max_replicas': expected a number with num_replicas 'auto', got none (each replica needs its GPUs
  or cores)
engine: {num_replicas: 3, min_replicas: 4, max_replicas: 8}
  'engine.num_replicas': expected 4 to 8, got 3 ('engine.min_replicas' and 'engine.max_replicas')
engine: {min_replicas: 4, max_replicas: 3}
  'engine.min_replicas': expected at most 3, got 4 ('engine.max_replicas' is 3)
colocated | engine: {num_replicas: 2, max_replicas: 4, gpus_per_rank: 0.5}
  'engine.max_replicas': expected none with placement 'colocated', got 4 (the slots that replicas share with
  the trainer are reserved when the fleet starts)
engine: {max_replicas: 4, extra: {disable_log_stats: true}}
  'engine.extra.disable_log_stats': expected false with 'engine.max_replicas', got true (the load is known
  from vLLM's statistics)
engine: {num_replicas: auto, max_replicas: 4}, weights: {min_replicas: 2}
  'weights.min_replicas': expected at most 1, got 2 ('engine.min_replicas' is 1)
engine: {env: {PATH: /tmp}}
  'engine.env': expected names like VLLM_*, NCCL_* or CUDA_*, got 'PATH'
engine: {num_replica: 2}
  unknown setting 'engine.num_replica' (did you mean 'num_replicas'?)
num_replicas: 2
  unknown setting 'num_replicas' (did you mean 'engine.num_replicas' or 'router.num_replicas'?)
security: {zzz: 2}
  unknown setting 'security.zzz' (expected one of token_file, user_token_file, checkpoint_roots)
engine: {num_replicas: 0}
  'engine.num_replicas': expected greater than 0, got 0
weights: {commit: one}
  'weights.commit': expected 'together' or 'rolling', got 'one'
store: 3
  'store': expected a section with its own settings (path, shared, keep, outside_versions), got 3
security: {checkpoint_roots: /data}
  'security.checkpoint_roots': expected a list, got '/data'
engine: {extra: 3}
  'engine.extra': expected a mapping, got 3
model: ''
  'model': expected a string with at least 1 character, got ''
trainer: {optimizer: {learning_rat: 1}}
  unknown setting 'trainer.optimizer.learning_rat' (did you mean 'learning_rate'?)
trainer: {optimizer: {schedule: cosine}}
  'trainer.optimizer.total_steps': expected a number with schedule 'cosine', got none (the schedule ends
  there)
weights: {stage_timeout_s: .inf}
  'weights.stage_timeout_s': expected a finite number, got inf
weights: {transport: tcp}
  'weights.transport': expected 'shm', 'gloo', 'ipc' or 'nccl', got 'tcp'
"""


def rules() -> dict[str, str]:
    """The sentences, each in one line, by settings."""
    found = (each.partition("\n") for each in re.split(r"\n(?=\S)", RULES.strip()))
    return {settings: " ".join(sentence.split()) for settings, _, sentence in found}


@pytest.mark.parametrize(("text", "sentence"), rules().items(), ids=rules())
def test_a_wrong_configuration_gets_a_sentence(text: str, sentence: str) -> None:
    base, _, settings = text.rpartition(" | ")
    assert complaint(**BASES.get(base, {}) | yaml.safe_load(f"{{{settings}}}")) == sentence


def test_on_a_gpu_drafting_ends_where_vllm_has_graphs_of_steps_without_drafts() -> None:
    drafts = {"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 255, 3], [256, 256, 0]]}
    settings = {**SEPARATE, "engine": {"min_draft_acceptance": 0.1, "extra": {"speculative_config": drafts}}}
    assert AppConfig(model="m", **settings).engine.min_draft_acceptance == 0.1


def test_everything_that_is_wrong_is_named_at_once() -> None:
    def named(**settings: object) -> list[str]:
        return [line.split("'")[1] for line in complaint(**settings).splitlines()]

    rules = ["weights.transport", "weights.staging", "weights.min_replicas"]
    assert named(device="cuda", weights={"min_replicas": 3, "staging": "none"}) == rules
    values = ["engine.num_replicas", "weights.transport", "modle"]
    assert named(engine={"num_replicas": 0}, weights={"transport": "tcp"}, modle="x") == values


def test_pydantics_own_error_has_the_sentence() -> None:
    # Serve validates the arguments itself, and shows this text.
    with pytest.raises(ValidationError, match=r"unknown setting 'engine.num_replica' \(did you mean"):
        AppConfig.model_validate({"model": "m", "engine": {"num_replica": 2}})
