"""What a replica's vLLM server is started with."""

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

WORKER_EXTENSION = "deployments.replica.worker_extension.WorkerExtension"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is started with.

    Attributes:
        model: a directory that vLLM can load, or a hub id.
        checkpoint: what the fleet started from, if `model` is another one: a version in the store.
        served_model_name: the name that clients use, whatever directory the weights came from.
        backend: the weight transfer backend, by its name in vLLM's registry.
        staging: device | host | none | automatic (device if this engine can, else host).
        staging_share: of the device's time, or a core's, that staging may take while requests run; 1: all.
        arguments: further fields of vLLM's `AsyncEngineArgs` and of its OpenAI server.
    """

    model: str
    served_model_name: str
    backend: str
    staging: str
    checkpoint: str | None = None
    staging_share: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def at(self, checkpoint: str) -> "EngineSpec":
        """The same with the weights of a stored version."""
        # `load_format: dummy` is about the checkpoint that the fleet starts from: a replica that takes its
        # place later would serve noise under the committed version's number.
        arguments = {**self.arguments, "load_format": "auto"}
        return replace(self, model=checkpoint, checkpoint=self.checkpoint or self.model, arguments=arguments)


def server_arguments(spec: EngineSpec) -> Namespace:
    """vLLM's own server arguments, so that every option of `vllm serve` has its usual default."""
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([])
    chosen = {
        "model": spec.model,
        "served_model_name": [spec.served_model_name],
        "weight_transfer_config": {"backend": spec.backend},
        "additional_config": {"staging": spec.staging, "checkpoint": spec.checkpoint or spec.model},
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_scale_out": True,  # /inference/v1/generate; what else it opens, `passed_routes` decides
        "log_error_stack": False,
        **spec.arguments,
    }
    for name, value in chosen.items():
        setattr(args, name, value)
    validate_parsed_serve_args(args)
    return cast(Namespace, args)


# How many tokens an engine on a CPU computes in one step.
#
# All requests of an engine wait for its step, also one that needs a single token. vLLM allows 2048 tokens of
# prompts in it, which are milliseconds on a GPU. On two cores they are 2.3 s for a model of 135M, so a
# request of 8 tokens waits for half a minute while prompts of others come in, or are computed again after an
# update. Products of 256 rows use the cores as well as products of 2048 do (benchmarks/RESULTS.md).

LEAST_TOKENS = 256
TOKENS_PER_THREAD = 128

Defaults = dict[UsageContext | None, int]


class FleetEngineArgs(AsyncEngineArgs):
    """vLLM's, with another default of `max_num_batched_tokens` on a CPU."""

    def get_batch_defaults(self, world_size: int) -> tuple[Defaults, Defaults]:
        tokens, sequences = super().get_batch_defaults(world_size)
        if current_platform.is_cpu():
            threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
            limit = max(step_tokens(threads), self.max_num_seqs or 0)  # a step has one token of each at least
            tokens = {context: min(count, limit) for context, count in tokens.items()}
        return tokens, sequences


def step_tokens(threads: int) -> int:
    """The most tokens of a step for an engine of so many threads."""
    return max(LEAST_TOKENS, TOKENS_PER_THREAD * threads)
