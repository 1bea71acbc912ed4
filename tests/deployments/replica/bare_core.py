"""vLLM's engine core and scheduler in a test, without a model and without processes."""

import queue
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import DeviceConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from deployments.replica import engine_core
from deployments.replica.continuation import TOKENS
from tests.tiny_models import save_tiny_llama

BLOCK = 16
PROMPT = list(range(2, 2 + 4 * BLOCK))


class Executor:
    """Records what the workers are asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def collective_rpc(self, method: str, *args: Any, **options: Any) -> list[Any]:
        self.asked.append(method)
        return [None]

    def reset_encoder_cache(self) -> None:
        self.asked.append("reset_encoder_cache")


class Core:
    """An `EngineCoreProc` with its scheduler and without its processes."""

    kind: type[EngineCoreProc] = EngineCoreProc

    def __init__(self, config: VllmConfig) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        core: Any = object.__new__(self.kind)
        structured = StructuredOutputManager(config)
        cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
        kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        core.scheduler = kind(config, cache, structured, BLOCK)
        core.structured_output_manager = structured
        core.mm_receiver_cache = None
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        core.request_block_hasher = get_request_block_hasher(BLOCK, hash_fn)
        core._weight_version = "7"
        core.model_executor = Executor()
        core.input_queue = queue.Queue()
        core.batch_queue = None
        core.engines_running = False
        core._idle_state_callbacks = []
        self.core = core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def receive(self, name: str, prompt: list[int] = PROMPT, *, salt: str | None = None, **more: Any) -> Any:
        """What the thread that receives requests does; the busy loop adds them later."""
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=more.get("mm_features"),
            sampling_params=SamplingParams(
                max_tokens=32, ignore_eos=True, extra_args={TOKENS: more.get("said", [])}
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        return self.core.preprocess_add_request(request)[0]

    def add(self, name: str, prompt: list[int] = PROMPT, **options: Any) -> Any:
        request = self.receive(name, prompt, **options)
        self.core.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """One step; each running request that is past its prompt gets a token, and drafts, none of which is
        accepted in the next one."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [[5] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
        indices = {name: index for index, name in enumerate(names)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=names, req_id_to_index=indices, sampled_token_ids=sampled)
        )
        if not isinstance(self.scheduler, AsyncScheduler):
            drafts = [[6] * output.num_spec_tokens_to_schedule for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return output

    def commit(self, version: str, *, recompute: bool) -> None:
        """A COMMIT between two steps."""
        done = engine_core.commit(self.core, version, recompute, True)
        if isinstance(done, Future):
            self.core._notify_idle_state_callbacks()
            done.result(timeout=0)


def config_of(
    directory: Path, *, a_step_ahead: bool = False, drafts: dict[str, Any] | None = None
) -> VllmConfig:
    """`drafts`: vLLM's speculative configuration."""
    arguments = EngineArgs(
        model=str(save_tiny_llama(directory, 1)),
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=64,
        max_num_seqs=2,
        block_size=BLOCK,
        enforce_eager=True,
        speculative_config=drafts,
    )
    created = arguments.create_engine_config()
    created.scheduler_config.async_scheduling = a_step_ahead  # vLLM turns it off on a CPU
    created.cache_config.num_gpu_blocks = 64
    created.device_config = DeviceConfig("cpu")
    return created
