"""The section `engine`: the rollout replicas."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from app.settings.section import ConfigError, Section, did_you_mean
from deployments.protocol.ledger_config import SizeLimits


def _engine_variable(name: str) -> str:
    if re.fullmatch(r"(VLLM|NCCL|CUDA)_[A-Z0-9_]+", name) is None:
        raise PydanticCustomError("variable_name", "names like VLLM_*, NCCL_* or CUDA_*")
    return name


EngineVariable = Annotated[str, AfterValidator(_engine_variable)]
EnvironmentValue = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
Fraction = Annotated[float, Field(gt=0, le=1)]
# None means 'auto'.
ReplicaCount = Annotated[
    PositiveInt | None, BeforeValidator(lambda value: None if value == "auto" else value)
]


class EngineConfig(Section):
    """The replicas. Settings that vLLM has too are passed on under its names."""

    num_replicas: ReplicaCount = 2
    """Replicas at the start. `auto`: `min_replicas`, and then as many as the load needs."""
    min_replicas: PositiveInt = 1
    """The fewest to which the fleet is scaled."""
    max_replicas: PositiveInt | None = None
    """The most to which the fleet is scaled, by `slipstream scale` or by the load. None: the number is
    fixed."""
    downscale_delay_s: NonNegativeFloat = 300.0
    """With `auto`: how long the load must have been lower before a replica is stopped."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the served weights. `auto`: the checkpoint's."""
    max_model_len: PositiveInt | None = None
    """The most tokens of a sequence, prompt included. None: the model's own."""
    max_num_seqs: PositiveInt = 256
    """The most sequences that one replica computes at once."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks over which each layer of a replica is split."""
    pipeline_parallel_size: PositiveInt = 1
    """Ranks over which a replica's layers are spread."""
    data_parallel_size: PositiveInt = 1
    """Ranks of one replica that compute different requests, for mixtures of experts."""
    gpu_memory_utilization: Fraction = 0.9
    """The share of a GPU's memory that an engine takes: weights, staging and KV cache."""
    enforce_eager: bool = False
    """Run without compilation and CUDA graphs."""
    gpus_per_rank: Fraction = 1.0
    """What Ray reserves for a rank; less than 1 where a trainer rank shares the GPU."""
    min_draft_acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Speculative decoding: the share of drafted tokens below which it does not pay. A replica that accepts
    less of its version's, of 1000 or more, drafts no more until the next version. 0: it always drafts."""
    drain_timeout_s: PositiveFloat = 120.0
    """How long a replica that is stopped waits for running requests."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, such as `quantization`, `load_format`,
    `enable_expert_parallel` and `enable_sleep_mode`, and those of tool calls (`tool_call_parser`, others)."""
    env: dict[EngineVariable, EnvironmentValue] = Field(default_factory=dict)
    """Environment of the engine processes: VLLM_*, NCCL_* and CUDA_*, for example `VLLM_BATCH_INVARIANT: 1`,
    or `VLLM_CPU_KVCACHE_SPACE: 4` (GiB, with device `cpu`; 1 if none is given)."""

    @property
    def first_replicas(self) -> int:
        return self.min_replicas if self.num_replicas is None else self.num_replicas

    @property
    def most_replicas(self) -> int:
        return self.first_replicas if self.max_replicas is None else self.max_replicas

    @property
    def size(self) -> SizeLimits:
        if self.max_replicas is None:
            first = self.first_replicas
            return SizeLimits(least=first, most=first, wanted=first)
        least = self.min_replicas
        return SizeLimits(least=least, most=self.max_replicas, wanted=self.num_replicas, fixed=None)

    @property
    def serves_adapters(self) -> bool:
        return bool(self.extra.get("enable_lora"))

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


# Settings that are not vLLM's.
OWN_SETTINGS = {
    *("num_replicas", "min_replicas", "max_replicas", "downscale_delay_s", "drain_timeout_s"),
    *("gpus_per_rank", "min_draft_acceptance", "extra", "env"),
}

# Arguments of `vllm serve`, not of the engine.
TOOL_ARGUMENTS = (
    "enable_auto_tool_choice",
    "exclude_tools_when_tool_choice_none",
    "tool_call_parser",
    "tool_strict_level",
)


def check_engine_args(extra: Mapping[str, Any]) -> None:
    """Check `engine.extra` against vLLM; imports vLLM unless it is empty. Raises ConfigError."""
    if not extra:
        return
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.tool_parsers import ToolParserManager

    names = [*(field.name for field in dataclasses.fields(AsyncEngineArgs)), *TOOL_ARGUMENTS]
    complaints = [*unknown_names(extra, names), *broken_tools(extra, ToolParserManager.list_registered())]
    if complaints:
        raise ConfigError("\n".join(complaints))


def unknown_names(extra: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    for name in (each for each in extra if each not in known):
        hint = did_you_mean(name.replace("-", "_"), known, "expected an argument of vLLM's AsyncEngineArgs")
        yield f"unknown setting 'engine.extra.{name}' ({hint})"


def broken_tools(extra: Mapping[str, Any], parsers: Collection[str]) -> Iterator[str]:
    """A replica would not start, or would ignore the parser."""
    parser, auto = extra.get("tool_call_parser"), extra.get("enable_auto_tool_choice", False)
    if not isinstance(auto, bool):
        yield f"'engine.extra.enable_auto_tool_choice': expected true or false, got {auto!r}"
    elif auto and parser is None:
        beside = "'engine.extra.tool_call_parser' beside it"
        yield f"'engine.extra.enable_auto_tool_choice': expected {beside}, got none"
    elif parser is not None and not auto:
        beside = "'engine.extra.enable_auto_tool_choice: true' beside it"
        yield f"'engine.extra.tool_call_parser': expected {beside}, got none"
    if parser is not None and parser not in parsers:
        hint = did_you_mean(str(parser), parsers, f"expected one of {', '.join(sorted(parsers))}")
        yield f"'engine.extra.tool_call_parser': unknown parser {parser!r} ({hint})"
