"""The composition root: `serve run serve_config.yaml` imports `build` from here.

No `from __future__ import annotations`: Serve reads the annotation of `build`'s argument, and would pass a
dict.
"""

import hashlib
import os
import warnings
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from app.http.auth import listening_address
from app.http.ingress import Ingress
from app.settings.actor_options import NO_CPU, ROLLOUT, THREADS_BIND, UNBOUND, engine_options
from app.settings.config import LOGPROBS_MODE, AppConfig
from app.settings.engine import OWN_SETTINGS, check_engine_args
from app.settings.gpus import check_gpus
from app.settings.models import model_name, resolve_model
from app.settings.section import ConfigError, Device, Placement
from app.settings.security import Tokens
from app.settings.weights import StagingMode
from deployments.controller.controller import Controller
from deployments.controller.ray_cluster import ServeReplicas
from deployments.replica.graceful_shutdown import RELEASE_S, WRITE_S
from deployments.replica.replica import Replica
from deployments.replica.server_arguments import EngineSpec
from deployments.router.forwarding import RouterLimits
from deployments.router.request_router import FleetRequestRouter
from deployments.serve.hosts import check_hosts
from deployments.serve.placement import FREE_TIMEOUT_S, SlotPlan, Slots
from deployments.serve.scaling import FleetScaling
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.trainer import STOP_TIMEOUT_S as TRAINER_STOP_TIMEOUT_S
from deployments.trainer.trainer import Trainer
from deployments.weights.transports.registry import backend
from trainers.settings import TrainerConfig

# One event loop instead of three saves two thread switches per streamed token. The router never blocks it.
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
SCALING_PERIOD_S = 1.0  # between replicas' reports to the scaling policy
# Not as a limit (Serve takes no larger one): Serve makes it a resource that replicas request from Ray. Ray
# places an actor without requests on any host, others on hosts in turn.
REPLICAS_PER_HOST = 100
STOP_TIMEOUT_S = 10.0  # an engine's, after its last request
# A replica without contact to the controller stops taking requests before the fleet moves on.
SELF_FENCE_FRACTION = 2 / 3
IN_ENGINE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
AUTOMATIC_STAGING = "automatic"  # 'device' if the engine's CPU allows it, else 'host'


def build(args: AppConfig) -> Application:
    """Raises ConfigError: vLLM, the environment or the cluster rules out a setting."""
    check_engine_args(args.engine.extra)
    if ray.is_initialized():  # always in Serve; not in tests
        check_gpus(args, [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]])
    http = listening_address() if ray.is_initialized() else None
    host = None if http is None else http[0]
    check_proxy(host, os.environ)
    tokens = args.security.tokens(host=host)  # before the model, which may take minutes
    model = str(resolve_model(args.model))
    if ray.is_initialized():
        require_hosts(args, model, sum(node["Alive"] for node in ray.nodes()), http)
    controller = _controller(args)
    slots = trainer = None
    if (plan := slot_plan(args)) is not None:
        slots = _single("slots", Slots, graceful_shutdown_timeout_s=FREE_TIMEOUT_S + 10).bind(plan)
    if args.trainer is not None:
        spec = trainer_spec(args, args.trainer, model)
        options = {"max_ongoing_requests": UNLIMITED, "graceful_shutdown_timeout_s": TRAINER_STOP_TIMEOUT_S}
        trainer = _single("trainer", Trainer, **options).bind(spec, controller, slots)
    rollout = _rollout(args, model, controller, slots)
    return _router(args, tokens, rollout=rollout, controller=controller, trainer=trainer)


def require_hosts(args: AppConfig, model: str, count: int, http: tuple[str, int] | None = None) -> None:
    """Raises ConfigError. `http`: where Serve listens on each host."""
    if count == 1:
        return
    if args.weights.transport == "shm":
        raise ConfigError(
            f"'weights.transport': expected 'gloo' in a cluster of {count} hosts, got 'shm', which connects "
            "processes of one host"
        )
    directories = {"state_dir": args.state_dir} if args.store.shared else {}
    if args.store.shared and not args.store_path.is_relative_to(args.state_dir):
        directories["store.path"] = args.store_path
    if lacking := check_hosts(directories, model, http, serve.status().proxies):
        raise ConfigError(
            "the cluster's hosts do not suffice:" + "".join(f"\n  - {each}" for each in lacking)
        )


def check_proxy(host: str | None, environment: Mapping[str, str]) -> None:
    """HAProxy reaches routers over IPv4 only, and would respond 500."""
    if host is not None and ":" in host and environment.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        raise ConfigError(
            f"'http_options.host': expected an IPv4 address, which HAProxy serves, got {host!r}; or "
            "start Ray without RAY_SERVE_ENABLE_HA_PROXY"
        )


def _controller(args: AppConfig) -> Application:
    replicas = ServeReplicas(ROLLOUT)
    return _single("controller", Controller, max_ongoing_requests=UNLIMITED).bind(
        config=args.ledger,
        model=model_name(args.model),
        state_dir=str(args.state_dir),
        store_dir=str(args.store_path),
        adapters=args.adapter_limits,
        adapter_roots=args.adapter_roots,
        rollouts=args.rollouts,
        max_versions=args.store.keep,
        is_alive=replicas.exists,
        kill=replicas.kill,
        size=args.fleet_size,
    )


def slot_plan(args: AppConfig) -> SlotPlan | None:
    """Named after the state directory; None if not colocated."""
    if args.placement is not Placement.COLOCATED or args.trainer is None:
        return None
    digest = hashlib.sha256(str(args.state_dir).encode()).hexdigest()[:12]
    return SlotPlan(
        name=f"slipstream-{digest}",
        slots=args.engine.first_replicas,
        gpus_per_slot=args.engine.world_size,
        engine_share=args.engine.gpus_per_rank,
        trainer_share=args.trainer.gpus_per_rank,
    )


def _rollout(args: AppConfig, model: str, controller: Application, slots: Application | None) -> Application:
    job = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    return serve.deployment(
        Replica,
        name=ROLLOUT,
        **_size(args),
        max_ongoing_requests=UNLIMITED,
        max_replicas_per_node=REPLICAS_PER_HOST,
        ray_actor_options=engine_options(args, job),
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=args.engine.drain_timeout_s + max(RELEASE_S, WRITE_S) + STOP_TIMEOUT_S,
        request_router_config=RequestRouterConfig(
            request_router_class=FleetRequestRouter, request_routing_stats_period_s=STATS_PERIOD_S
        ),
    ).bind(
        engine_spec(args, model),
        controller,
        self_fence_s=args.weights.heartbeat_timeout_s * SELF_FENCE_FRACTION,
        drain_s=args.engine.drain_timeout_s,
        slots=slots,
        cores_shared_by=args.engine.most_replicas if args.device is Device.CPU else None,
        store=(str(args.store_path), None if args.store.shared else args.store.keep),
    )


def _size(args: AppConfig) -> dict[str, Any]:
    engine = args.engine
    if engine.max_replicas is None:
        return {"num_replicas": engine.first_replicas}
    with warnings.catch_warnings():  # Serve prefers one interval for all, in a variable
        warnings.simplefilter("ignore", DeprecationWarning)
        config = AutoscalingConfig(
            min_replicas=engine.min_replicas,
            max_replicas=engine.max_replicas,
            # Serve would reset the size with every new configuration.
            initial_replicas=None if _is_deployed() else engine.first_replicas,
            metrics_interval_s=SCALING_PERIOD_S,
            look_back_period_s=10 * SCALING_PERIOD_S,
            upscale_delay_s=0.0,  # the policy has delays of its own, which an operator's number skips
            downscale_delay_s=0.0,
            policy=AutoscalingPolicy(
                policy_function=FleetScaling,
                policy_kwargs={
                    "least": engine.min_replicas,
                    "most": engine.max_replicas,
                    "down_s": engine.downscale_delay_s,
                },
            ),
        )
    return {"autoscaling_config": config}


def _is_deployed() -> bool:
    if not ray.is_initialized():
        return False
    return any(ROLLOUT in application.deployments for application in serve.status().applications.values())


def _router(
    args: AppConfig,
    tokens: Tokens,
    *,
    rollout: Application,
    controller: Application,
    trainer: Application | None,
) -> Application:
    return serve.deployment(
        serve.ingress()(Ingress),
        name="router",
        num_replicas=args.router.num_replicas,
        max_ongoing_requests=UNLIMITED,  # the router limits requests itself: 503 with Retry-After
        max_replicas_per_node=REPLICAS_PER_HOST,
        ray_actor_options=ROUTER_OPTIONS,
        health_check_period_s=HEALTH_PERIOD_S,
    ).bind(
        rollout,
        controller,
        trainer,
        RouterLimits(**args.router.model_dump(exclude={"num_replicas"})),
        tokens,
        args.weights.allow_pickled_ipc_over_http,
        args.checkpoint_roots,
        args.security.urls,
    )


def _single(name: str, deployed: type, **options: float) -> serve.Deployment:
    return serve.deployment(
        deployed,
        name=name,
        num_replicas=1,
        ray_actor_options=NO_CPU,
        health_check_period_s=HEALTH_PERIOD_S,
        **options,
    )


def engine_spec(args: AppConfig, model: str) -> EngineSpec:
    arguments = {
        **args.engine.model_dump(exclude=OWN_SETTINGS),
        "trust_remote_code": args.trust_remote_code,
        **executor(args),
        **({} if args.rollouts is None else {"logprobs_mode": LOGPROBS_MODE}),
        **args.engine.extra,
    }
    return EngineSpec(
        model=model,
        served_model_name=args.public_model_name,
        backend=backend(args.weights.transport, staging(args), args.weights.wire.value),
        staging=staging(args),
        staging_share=args.weights.effective_staging_share,
        proof_sequences=args.weights.proof.sequences,
        min_draft_acceptance=args.engine.min_draft_acceptance,
        arguments=arguments,
    )


def executor(config: AppConfig) -> dict[str, str]:
    """vLLM's `distributed_executor_backend`; empty: vLLM chooses, on a CPU "mp", to bind threads to cores.
    Unbound, engine and worker busy-wait for each other for up to a second (`SpinCondition` in
    vllm/distributed/device_communicators/shm_broadcast.py)."""
    if config.engine.world_size > 1:
        # Inside a placement group vLLM would take Ray's workers.
        return {"distributed_executor_backend": "mp"}
    if config.device is Device.CPU and config.engine.env.get(THREADS_BIND, UNBOUND) == UNBOUND:
        return {"distributed_executor_backend": IN_ENGINE_PROCESS}
    return {}


def staging(config: AppConfig) -> str:
    if config.weights.staging is not None:
        return config.weights.staging.value
    if config.device is Device.CPU and not config.engine.serves_adapters:
        return AUTOMATIC_STAGING
    return StagingMode.HOST.value


def trainer_spec(args: AppConfig, trainer: TrainerConfig, model: str) -> TrainerSpec:
    return TrainerSpec(
        model=model,
        store_dir=str(args.store_path),
        store_keep=None if args.store.shared else args.store.keep,
        transport=args.weights.transport,
        chunk_bytes=args.weights.effective_chunk_bytes,
        native=args.weights.staging is StagingMode.NONE,
        keep_published=args.weights.keep_published,
        device=args.device.value,
        config=trainer,
        trust_remote_code=args.trust_remote_code,
        revision=args.engine.extra.get("revision"),  # as replicas: version 0 is the same everywhere
        proof_sequences=args.weights.proof.sequences,
    )
