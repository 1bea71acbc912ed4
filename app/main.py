"""The composition root: `serve run serve_config.yaml` imports `build` from here.

No `from __future__ import annotations` in this module: Serve validates the arguments of `build` by its
annotation, and would pass a raw dict if that were text.
"""

import os

import ray
from pydantic import SecretStr
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app.http.ingress import Ingress
from app.settings.config import AppConfig
from app.settings.devices import Device, Placement
from app.settings.engine_args import check_engine_args
from app.settings.gpus import check_gpus, slot_plan
from app.settings.models import resolve_model
from app.settings.trainer import trainer_spec
from deployments.controller.controller import Controller
from deployments.controller.liveness import ServeReplicas
from deployments.placement import FREE_TIMEOUT_S, Slots
from deployments.replica.engine import EngineSpec
from deployments.replica.replica import Replica
from deployments.router.request_router import FleetRequestRouter
from deployments.router.router import RouterLimits
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.trainer import STOP_TIMEOUT_S as TRAINER_STOP_TIMEOUT_S
from deployments.trainer.trainer import Trainer
from deployments.weights.transports.registry import backend

# A replica reserves one CPU by default, and requests to one that cannot be placed hang without an error.
NO_CPU = {"num_cpus": 0}
# One event loop instead of three: every streamed token would change threads twice. Only the router may do
# this, because it never blocks.
ROUTER_OPTIONS = {
    "num_cpus": 0,
    "runtime_env": {
        "env_vars": {
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
            "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        }
    },
}
UNLIMITED = 1_000_000
HEALTH_PERIOD_S = 1.0
STATS_PERIOD_S = 0.5
STOP_TIMEOUT_S = 10.0  # of an engine, after its last request
ROLLOUT = "rollout"
# A replica that cannot reach the controller stops taking requests before the fleet continues without it.
SELF_FENCE_FRACTION = 2 / 3


def build(args: AppConfig) -> Application:
    """The application of one configuration.

    Raises:
        ConfigError: vLLM, the environment or the cluster does not allow a setting.
    """
    check_engine_args(args.engine.extra)
    if ray.is_initialized():  # always where Serve builds; a test may build without a cluster
        check_gpus(args, [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]])
    token = args.security.token()  # before the model, which may take minutes to prepare
    model = str(resolve_model(args.model))
    controller = _controller(args)
    slots = _slots(args)
    trainer = None
    if args.trainer is not None:
        trainer = _trainer(trainer_spec(args, args.trainer, model), controller, slots)
    rollout = _rollout(args, model, controller, slots)
    return _router(args, token, rollout=rollout, controller=controller, trainer=trainer)


def _controller(args: AppConfig) -> Application:
    return _single("controller", Controller, max_ongoing_requests=UNLIMITED).bind(
        config=args.weights.ledger(),
        state_dir=str(args.state_dir),
        store_dir=str(args.store_path),
        max_versions=args.store.keep,
        outside_versions=args.store.outside_versions,
        is_alive=ServeReplicas(ROLLOUT),
    )


def _trainer(spec: TrainerSpec, controller: Application, slots: Application | None) -> Application:
    return _single(
        "trainer",
        Trainer,
        max_ongoing_requests=UNLIMITED,
        graceful_shutdown_timeout_s=TRAINER_STOP_TIMEOUT_S,
    ).bind(spec, controller, slots)


def _slots(args: AppConfig) -> Application | None:
    """The GPUs that replicas and trainer share; None if they have GPUs of their own, or none."""
    plan = slot_plan(args)
    if plan is None:
        return None
    return _single("slots", Slots, graceful_shutdown_timeout_s=FREE_TIMEOUT_S + 10).bind(plan)


def _rollout(args: AppConfig, model: str, controller: Application, slots: Application | None) -> Application:
    return serve.deployment(
        Replica,
        name=ROLLOUT,
        num_replicas=args.engine.num_replicas,
        max_ongoing_requests=UNLIMITED,
        ray_actor_options=_engine_resources(args),
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=args.engine.drain_timeout_s + STOP_TIMEOUT_S,
        request_router_config=RequestRouterConfig(
            request_router_class=FleetRequestRouter, request_routing_stats_period_s=STATS_PERIOD_S
        ),
    ).bind(
        engine_spec(args, model),
        controller,
        kv_cache=args.weights.kv_cache,
        self_fence_s=args.weights.heartbeat_timeout_s * SELF_FENCE_FRACTION,
        drain_s=args.engine.drain_timeout_s,
        slots=slots,
    )


def _router(
    args: AppConfig,
    token: SecretStr | None,
    *,
    rollout: Application,
    controller: Application,
    trainer: Application | None,
) -> Application:
    limits = RouterLimits(
        max_in_flight=args.router.max_ongoing_requests + args.router.max_queued_requests,
        max_body_bytes=args.router.max_body_bytes,
        retry_after_s=args.router.retry_after_s,
        find_replica_timeout_s=args.router.request_timeout_s,
        weight_timeout_s=args.router.request_timeout_s,
    )
    return serve.deployment(
        serve.ingress()(Ingress),
        name="router",
        num_replicas=args.router.num_replicas,
        max_ongoing_requests=UNLIMITED,  # the router counts by itself, to answer 503 with Retry-After
        ray_actor_options=ROUTER_OPTIONS,
        health_check_period_s=HEALTH_PERIOD_S,
    ).bind(
        rollout,
        controller,
        trainer,
        limits,
        None if token is None else token.get_secret_value(),
        args.weights.allow_pickled_ipc_over_http,
    )


def _single(name: str, deployed: type, **options: float) -> serve.Deployment:
    """A deployment of one replica that computes little."""
    return serve.deployment(
        deployed,
        name=name,
        num_replicas=1,
        ray_actor_options=NO_CPU,
        health_check_period_s=HEALTH_PERIOD_S,
        **options,
    )


def engine_spec(args: AppConfig, model: str) -> EngineSpec:
    """The engine of each replica.

    Args:
        model: a directory or a hub id.
    """
    engine = args.engine
    arguments = {
        "dtype": engine.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "seed": engine.seed,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "data_parallel_size": engine.data_parallel_size,
        "enable_expert_parallel": engine.enable_expert_parallel,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "enforce_eager": engine.enforce_eager,
        "load_format": engine.load_format,
        "quantization": engine.quantization,
        "enable_sleep_mode": engine.enable_sleep_mode,
        # vLLM would take Ray's workers when it finds itself inside a placement group.
        **({"distributed_executor_backend": "mp"} if engine.world_size > 1 else {}),
        **engine.extra,
    }
    return EngineSpec(
        model=model,
        served_model_name=args.public_model_name,
        backend=backend(args.weights.transport, args.weights.staging.value),
        staging=args.weights.staging.value,
        staging_share=args.weights.effective_staging_share,
        arguments=arguments,
    )


def _engine_resources(args: AppConfig) -> dict[str, object]:
    """The resources that Ray reserves for a replica, and the environment of its processes."""
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if args.device is Device.CPU:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(args.engine.cpu_kv_cache_gib),
            # Ray allows an actor without CPUs one thread; vLLM would bind each engine to all cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.engine.num_replicas)),
        }
    gpus = 0.0  # colocated: the replica takes a slot
    if args.device is Device.CUDA and args.placement is Placement.SEPARATE:
        gpus = args.engine.gpus_per_rank * args.engine.world_size
    return {
        "num_cpus": args.engine.num_cpus,
        "num_gpus": gpus,
        "runtime_env": {"env_vars": environment | args.engine.env},
    }
