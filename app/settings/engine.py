"""The section `engine`: the rollout replicas."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from app.settings.section import Section


def _engine_variable(name: str) -> str:
    if re.fullmatch(r"(VLLM|NCCL|CUDA)_[A-Z0-9_]+", name) is None:
        raise PydanticCustomError("variable_name", "names like VLLM_*, NCCL_* or CUDA_*")
    return name


EngineVariable = Annotated[str, AfterValidator(_engine_variable)]
EnvironmentValue = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class EngineConfig(Section):
    """The rollout replicas: one vLLM engine each."""

    num_replicas: PositiveInt = 2
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: PositiveInt | None = None  # None: the model's own
    max_num_seqs: PositiveInt = 256
    seed: int = 0
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    enable_expert_parallel: bool = False
    gpu_memory_utilization: Fraction = 0.9
    cpu_kv_cache_gib: PositiveInt = 1
    enforce_eager: bool = False
    load_format: str = "auto"
    quantization: str | None = None
    enable_sleep_mode: bool = False
    gpus_per_rank: PositiveFloat = 1.0  # a fraction when a trainer rank shares the GPU
    # Reserved per replica. If the cluster has fewer, the replica is never placed and requests hang silently.
    num_cpus: NonNegativeFloat = 0.0
    start_timeout_s: PositiveFloat = 600.0
    drain_timeout_s: PositiveFloat = 10.0
    extra: dict[str, Any] = Field(
        default_factory=dict
    )  # further arguments of vLLM's AsyncEngineArgs, by name
    # Environment of the engine processes: VLLM_*, NCCL_* and CUDA_*, for example VLLM_BATCH_INVARIANT: 1.
    env: dict[EngineVariable, EnvironmentValue] = Field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Workers of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
