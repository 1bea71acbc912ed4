"""What Ray is told about a replica's process.

Serve replaces `ray_actor_options` as a whole with those of a Serve config file, so these are completed.
"""

from collections.abc import Mapping
from typing import Any

from app.settings.config import AppConfig
from app.settings.gpus import replica_gpus
from app.settings.section import Device
from deployments.host.fork_server.use import forked_worker

ROLLOUT = "rollout"
# A replica reserves one CPU by default; without a free one its requests hang silently.
NO_CPU = {"num_cpus": 0}
THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
UNBOUND = "nobind"


def engine_options(args: AppConfig, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Must not depend on the number of replicas: a change restarts all of them.

    `environment`: the `runtime_env` of the job, or of the replicas.
    """
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_API_KEY": "",  # routers check tokens; the operator's would lock them out
        # Routers limit lists; a replica's part depends on the load.
        "VLLM_MAX_COMPLETION_PROMPTS": str((1 << 31) - 1),
    }
    if args.device is Device.CUDA:
        # A successor measures no memory, and captures CUDA graphs once instead of twice.
        variables["VLLM_ENABLE_STARTUP_PLAN"] = "1"
    else:
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            THREADS_BIND: UNBOUND,  # vLLM would bind every engine to the same cores
        }
    return {
        **NO_CPU,
        "num_gpus": replica_gpus(args),
        "runtime_env": {"env_vars": variables | args.engine.env, **forked_worker(environment)},
    }


def completed(own: Mapping[str, Any], args: AppConfig, job: Mapping[str, Any]) -> dict[str, Any]:
    """`own`: the `ray_actor_options` of a Serve config file. `job`: its `runtime_env`."""
    environment = own.get("runtime_env") or {}
    options = engine_options(args, {**job, **environment})
    variables = {**options["runtime_env"]["env_vars"], **(environment.get("env_vars") or {})}
    return {
        **options,
        **own,
        "runtime_env": {**options["runtime_env"], **environment, "env_vars": variables},
    }
