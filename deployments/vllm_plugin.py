"""vLLM's plugin (entry point group `vllm.general_plugins`): registers the transports in every process.

vLLM spawns its workers: an engine registered only in the parent is missing there. Also installs the commit in
engine cores, and in workers what continued answers and CPU sampling need.
"""

import copy
import functools

from deployments.host.parent_death import follow_owner
from deployments.replica import continuation, cpu_sampling, engine_core
from deployments.weights.staging import drafted_model
from deployments.weights.transports.registry import PACKAGE, TRANSPORTS


def register() -> None:
    """May run more than once."""
    follow_owner()
    engine_core.install()
    share_compile_cache()
    cpu_sampling.install()
    continuation.install()
    drafted_model.install()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for transport in TRANSPORTS.values():
        name, module, classes = transport.backend, transport.module, transport.name.capitalize()
        if name in WeightTransferEngineFactory._registry:
            continue
        WeightTransferEngineFactory.register_engine(name, module, f"{classes}WeightTransferEngine")
        WeightTransferTrainerFactory.register_engine(name, module, f"{classes}TrainerWeightTransferEngine")
        if transport.native:
            WeightTransferEngineFactory.register_engine(
                transport.staged_backend, f"{PACKAGE}.vllm_{transport.name}", f"Staged{classes}Engine"
            )


def share_compile_cache() -> None:
    """A successor finds what its predecessor compiled.

    vLLM keys its compile cache and its startup plan by the path and the revision of the checkpoint, beside
    the configuration that it read there. A replica that starts from a stored version has another path after
    each round, and would compile again. Neither changes the graph; vLLM hashes the source files that it
    traced, too.
    """
    from vllm.config import ModelConfig

    by_path = ModelConfig.compute_hash
    if hasattr(by_path, "__wrapped__"):
        return

    @functools.wraps(by_path)
    def compute_hash(config: ModelConfig) -> str:
        placeless = copy.copy(config)
        for name in ("model", "model_weights", "revision"):
            setattr(placeless, name, "")
        return by_path(placeless)

    ModelConfig.compute_hash = compute_hash
