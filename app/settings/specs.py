"""What engines and the trainer are started with, where several sections decide it."""

from app.settings.config import AppConfig
from app.settings.section import Device
from app.settings.weights import StagingMode
from deployments.trainer.spec import TrainerSpec
from trainers.settings import TrainerConfig

THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
UNBOUND = "nobind"
IN_ENGINE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def executor(config: AppConfig) -> dict[str, str]:
    """vLLM's argument `distributed_executor_backend`; empty: vLLM chooses.

    On a CPU vLLM chooses "mp", so that it can bind the worker's threads to cores. Where nothing is bound,
    engine and worker only spin while they wait for each other, up to a second each time (`SpinCondition` in
    vllm/distributed/device_communicators/shm_broadcast.py): `benchmarks/RESULTS.md` has what that costs.
    """
    if config.engine.world_size > 1:
        # Inside a placement group vLLM would take Ray's workers.
        return {"distributed_executor_backend": "mp"}
    if config.device is Device.CPU and config.engine.env.get(THREADS_BIND, UNBOUND) == UNBOUND:
        return {"distributed_executor_backend": IN_ENGINE_PROCESS}
    return {}


# The engine looks whether 'device' is possible on its CPU, and says why if it takes 'host'.
AUTOMATIC = "automatic"


def staging(config: AppConfig) -> str:
    """The configured staging, or the one for this device."""
    if config.weights.staging is not None:
        return config.weights.staging.value
    if config.device is Device.CPU and not config.engine.serves_adapters:
        return AUTOMATIC
    return StagingMode.HOST.value


def trainer_spec(args: AppConfig, trainer: TrainerConfig, model: str) -> TrainerSpec:
    """The spec of a trainer.

    Args:
        model: the checkpoint directory or hub id that `args.model` resolved to.
    """
    return TrainerSpec(
        model=model,
        store_dir=str(args.store_path),
        transport=args.weights.transport,
        chunk_bytes=args.weights.effective_chunk_bytes,
        native=args.weights.staging is StagingMode.NONE,
        device=args.device.value,
        config=trainer,
        trust_remote_code=args.trust_remote_code,
        revision=args.engine.extra.get("revision"),  # of the replicas: version 0 is the same everywhere
    )
