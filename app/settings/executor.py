"""In which processes an engine's workers run, where vLLM's own choice does not fit."""

from app.settings.config import AppConfig
from app.settings.devices import Device

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
