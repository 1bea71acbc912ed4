"""What a replica's vLLM server is started with."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

WORKER_EXTENSION = "deployments.replica.adapters.worker.WorkerExtension"


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
