"""vLLM's plugin entry point: registers the transports in every process that vLLM spawns, and installs the
commit in its engine cores and what seeds need on a CPU.

vLLM's workers are spawned, so an engine registered only in the parent does not exist in them; the
entry point group `vllm.general_plugins` is loaded everywhere.
"""

from deployments.host.parent_death import follow_owner
from deployments.replica import cpu_seeds, engine_core
from deployments.weights.transports.registry import TRANSPORTS


def register() -> None:
    """Register both halves of every transport, and receivers of vLLM's own wire.

    vLLM calls this more than once in a process.
    """
    follow_owner()
    engine_core.install()
    cpu_seeds.install()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for transport in TRANSPORTS.values():
        name, module = transport.backend, transport.module
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, transport.receiver_class)
            WeightTransferTrainerFactory.register_engine(name, module, transport.sender_class)
        staged = transport.staged_backend
        if transport.native and staged not in WeightTransferEngineFactory._registry:  # vLLM's own half sends
            WeightTransferEngineFactory.register_engine(
                staged, transport.staged_module, transport.staged_class
            )
