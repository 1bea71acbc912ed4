"""vLLM's plugin entry point: makes the transports known in every process that vLLM spawns.

vLLM's workers are spawned, so an engine registered only in the parent does not exist in them; the
entry point group `vllm.general_plugins` is loaded everywhere.
"""

TRANSPORTS = {
    "shm": ("deployments.weights.shm", "Shm"),
    "gloo": ("deployments.weights.gloo", "Gloo"),
}


def register() -> None:
    """Register both halves of every transport; vLLM calls this more than once in a process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for name, (module, prefix) in TRANSPORTS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, f"{prefix}WeightTransferEngine")
            WeightTransferTrainerFactory.register_engine(
                name, module, f"{prefix}TrainerWeightTransferEngine"
            )
