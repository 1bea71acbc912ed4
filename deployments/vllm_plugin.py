"""vLLM's plugin (entry point group `vllm.general_plugins`): registers the transports in every process.

vLLM spawns its workers: an engine registered only in the parent is missing there. Also installs the commit in
engine cores, and in workers what continued answers and CPU sampling need.
"""

from deployments.host.parent_death import follow_owner
from deployments.replica import compile_cache, continuation, cpu_sampling, engine_core
from deployments.weights.staging import drafted_model
from deployments.weights.transports.registry import PACKAGE, TRANSPORTS


def register() -> None:
    """May run more than once."""
    follow_owner()
    engine_core.install()
    compile_cache.install()
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
