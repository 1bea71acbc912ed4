import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from deployments.host import tracing
from deployments.protocol.poll import InitialWeights
from deployments.vllm_versions import OLD, server_parser

# Data-parallel ranks agree upon a commit at every so many steps (vLLM's default: 16). An agreement is a
# collective of two integers on the host; each step has one of its own.
DP_SYNC_STEPS = 4

# They change the memory that vLLM measures, but not the key of its startup plan.
_SIZES_KV_CACHE = (
    *("gpu_memory_utilization", "speculative_config"),
    *("limit_mm_per_prompt", "mm_processor_kwargs", "skip_mm_profiling"),
)

WORKER_EXTENSION = "deployments.replica.worker_extension.WorkerExtension"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Arguments of an engine.

    Attributes:
        checkpoint: the fleet's initial checkpoint, if `model` is a version in the store.
        backend: the weight transfer backend, by its name in vLLM's registry.
        staging: device | host | none | automatic (device if this engine can, else host).
        staging_share: share of a GPU's time for staging while requests run, in (0, 1].
        proof_sequences: scored with each version, see `replica.scoring`; 0: none.
        min_draft_acceptance: the share of drafted tokens below which drafting stops; 0: it never does.
        arguments: further fields of vLLM's `AsyncEngineArgs` and of its OpenAI server.
    """

    model: str
    served_model_name: str
    backend: str
    staging: str
    checkpoint: str | None = None
    staging_share: float = 1.0
    proof_sequences: int = 0
    min_draft_acceptance: float = 0.0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_dummy_weights(self) -> bool:
        return bool(self.arguments.get("load_format") == "dummy")

    def at_commit(self, initial: InitialWeights | None) -> "EngineSpec":
        """This commit of the hub id, even if its branch moved."""
        if initial is None or initial.commit is None:
            return self
        arguments = {**self.arguments, "revision": initial.commit}
        if arguments.get("tokenizer") is not None:  # vLLM would look for that commit in its repository too
            arguments.setdefault("tokenizer_revision", self.arguments.get("revision", "main"))
        return replace(self, arguments=arguments)

    def at(self, checkpoint: str) -> "EngineSpec":
        # `load_format: dummy` is for the initial checkpoint; here it would serve noise.
        arguments = {**self.arguments, "load_format": "auto"}
        return replace(self, model=checkpoint, checkpoint=self.checkpoint or self.model, arguments=arguments)


def server_arguments(spec: EngineSpec) -> Namespace:
    cli = server_parser()
    args = cli.make_arg_parser(FlexibleArgumentParser()).parse_args([])
    chosen = {
        "model": spec.model,
        "served_model_name": [spec.served_model_name],
        "weight_transfer_config": {"backend": spec.backend},
        "additional_config": {
            "staging": spec.staging,
            "checkpoint": spec.checkpoint or spec.model,
            **{name: str(spec.arguments.get(name)) for name in _SIZES_KV_CACHE},
        },
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_scale_out": True,  # /inference/v1/generate; `passed_routes` filters the rest
        "log_error_stack": False,
        "dp_sync_interval": DP_SYNC_STEPS,
        **tracing.engine_arguments(),
        **spec.arguments,
    }
    for name, value in chosen.items():
        setattr(args, name, value)
    cli.validate_parsed_serve_args(args)
    return cast(Namespace, args)


def check_drafting(spec: EngineSpec, config: VllmConfig) -> None:
    """Raises ValueError."""
    if spec.min_draft_acceptance and OLD and current_platform.is_cpu() and config.model_config.is_hybrid:
        raise ValueError(
            "engine.min_draft_acceptance: expected 0 with recurrent layers in vLLM 0.32 on a CPU, "
            f"got {spec.min_draft_acceptance:g} (steps with fewer drafts than configured read a wrong state)"
        )


# Per step of a CPU engine. vLLM's default, 2048, takes 2.3 s on two cores for a 135M model, and every request
# waits for each step. 256 rows use the cores as well (benchmarks/RESULTS.md).
LEAST_TOKENS = 256
TOKENS_PER_THREAD = 128

Defaults = dict[UsageContext | None, int]


class FleetEngineArgs(AsyncEngineArgs):
    def get_batch_defaults(self, world_size: int) -> tuple[Defaults, Defaults]:
        tokens, sequences = super().get_batch_defaults(world_size)
        if current_platform.is_cpu():
            threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
            limit = max(step_tokens(threads), self.max_num_seqs or 0)  # one token per sequence at least
            tokens = {context: min(count, limit) for context, count in tokens.items()}
        return tokens, sequences


def step_tokens(threads: int) -> int:
    return max(LEAST_TOKENS, TOKENS_PER_THREAD * threads)
