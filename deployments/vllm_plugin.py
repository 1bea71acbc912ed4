"""vLLM's plugin entry point: makes the transports known in every process that vLLM spawns, and the commit in
its engine cores.

vLLM's workers are spawned, so an engine registered only in the parent does not exist in them; the
entry point group `vllm.general_plugins` is loaded everywhere.
"""

from deployments.replica import engine_core
from deployments.replica.parent_death import follow_owner

# The name in vLLM's registry: the module, and the prefix of its two classes. vLLM's own "ipc" and
# "nccl", which load inside a pause, keep their names and stay selectable (`staging: none`).
TRANSPORTS = {
    "shm": ("deployments.weights.transports.shm", "Shm"),
    "gloo": ("deployments.weights.transports.gloo", "Gloo"),
    "slipstream_ipc": ("deployments.weights.transports.ipc", "Ipc"),
    "slipstream_nccl": ("deployments.weights.transports.nccl", "Nccl"),
}


def backend(transport: str, staging: str) -> str:
    """The name in vLLM's registry of a transport of the configuration (shm, gloo, ipc, nccl)."""
    return transport if staging == "none" or transport in TRANSPORTS else f"slipstream_{transport}"


def register() -> None:
    """Register both halves of every transport; vLLM calls this more than once in a process."""
    follow_owner()
    engine_core.install()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for name, (module, prefix) in TRANSPORTS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, f"{prefix}WeightTransferEngine")
            WeightTransferTrainerFactory.register_engine(name, module, f"{prefix}TrainerWeightTransferEngine")
