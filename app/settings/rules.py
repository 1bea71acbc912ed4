"""Which settings do not go together: pure rules that yield sentences (what was expected, what came)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.settings.config import AppConfig

# Set from settings of their own, so that there is one place for each.
RESERVED_ENGINE_ARGS = {
    "model": "model",
    "tokenizer": "model",
    "served_model_name": "served_model_name",
    "weight_transfer_config": "weights.transport",
    "data_parallel_rank": "engine.data_parallel_size",
}


# Variables of the engine that have settings of their own, or that placement decides.
RESERVED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "placement",
    "VLLM_CPU_KVCACHE_SPACE": "engine.cpu_kv_cache_gib",
}


def broken_rules(config: AppConfig) -> Iterator[str]:
    yield from _device_rules(config)
    yield from _count_rules(config)
    yield from _gpu_share_rules(config)
    yield from _trainer_rules(config)
    yield from _extra_rules(config)


def _expected(setting: str, expected: str, came: object, why: str) -> str:
    return f"'{setting}': expected {expected}, but {came} came ({why})"


def _device_rules(config: AppConfig) -> Iterator[str]:
    transport, staging = config.weights.transport.value, config.weights.staging.value
    if config.device == "cpu":
        if transport in ("ipc", "nccl"):
            why = "CUDA IPC and NCCL need GPUs: device 'cuda'"
            yield _expected("weights.transport", "'shm' or 'gloo' with device 'cpu'", repr(transport), why)
        if staging == "device":
            why = "a shadow of the parameters needs a GPU: device 'cuda'"
            yield _expected("weights.staging", "'host' with device 'cpu'", repr(staging), why)
        if config.placement == "colocated":
            why = "there is no GPU to share with device 'cpu'"
            yield _expected("placement", "'separate'", repr(config.placement.value), why)
        if config.engine.enable_sleep_mode:
            why = "only GPU memory can be given back"
            yield _expected("engine.enable_sleep_mode", "false with device 'cpu'", "true", why)
    elif transport in ("shm", "gloo"):
        why = "'shm' and 'gloo' connect CPU engines"
        yield _expected("weights.transport", "'ipc' or 'nccl' with device 'cuda'", repr(transport), why)
    if staging == "none" and transport in ("shm", "gloo"):
        why = "'none' means vLLM's own engines, which are 'ipc' and 'nccl'"
        yield _expected("weights.staging", f"'host' with transport {transport!r}", "'none'", why)


def _count_rules(config: AppConfig) -> Iterator[str]:
    replicas = config.engine.num_replicas
    for name in ("min_replicas", "max_unavailable"):
        count = getattr(config.weights, name)
        if count > replicas:
            why = f"'engine.num_replicas' is {replicas}"
            yield _expected(f"weights.{name}", f"at most {replicas}", count, why)
    if config.weights.lease_s < config.weights.heartbeat_timeout_s:
        why = "a publisher must not lose its lease sooner than a replica its membership"
        least = f"at least 'weights.heartbeat_timeout_s', {config.weights.heartbeat_timeout_s:g}"
        yield _expected("weights.lease_s", least, f"{config.weights.lease_s:g}", why)
    if config.engine.enable_expert_parallel and config.engine.world_size == 1:
        why = "experts are spread over the ranks of one replica"
        yield _expected(
            "engine.enable_expert_parallel",
            "more than one rank in a replica, or false",
            "true with 1 rank",
            why,
        )


def _gpu_share_rules(config: AppConfig) -> Iterator[str]:
    if config.device == "cpu":
        return
    shares = {"engine.gpus_per_rank": config.engine.gpus_per_rank}
    if config.trainer is not None:
        shares["trainer.gpus_per_rank"] = config.trainer.gpus_per_rank
    for name, share in shares.items():
        if share > 1:
            yield _expected(name, "at most 1", f"{share:g}", "a rank runs on one GPU")
    yield from _whole_gpu_rules(config, shares)
    if config.placement == "colocated" and config.trainer is not None and (total := sum(shares.values())) > 1:
        parts = " + ".join(f"{share:g}" for share in shares.values())
        why = "an engine rank and a trainer rank share each GPU when colocated"
        yield _expected(
            "engine.gpus_per_rank + trainer.gpus_per_rank", "at most 1", f"{parts} = {total:g}", why
        )


def _whole_gpu_rules(config: AppConfig, shares: Mapping[str, float]) -> Iterator[str]:
    """Ranks of one group must be on different GPUs, which Ray ensures for whole ones and slots."""
    if config.placement == "colocated":
        return
    ranks = {"engine.gpus_per_rank": config.engine.world_size}
    if config.trainer is not None:
        ranks["trainer.gpus_per_rank"] = config.trainer.world_size
    for name, count in ranks.items():
        if count > 1 and shares[name] < 1:
            why = f"{count} ranks need a GPU each, and fractions could put them on one"
            yield _expected(name, "1 with placement 'separate'", f"{shares[name]:g}", why)


def _trainer_rules(config: AppConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer is None:
        if config.placement == "colocated":
            why = "nothing shares the GPUs without one"
            yield _expected("trainer", "a trainer with placement 'colocated'", "none", why)
        return
    if trainer.strategy == "single" and trainer.world_size != 1:
        why = "more than one rank needs strategy 'fsdp2'"
        yield _expected("trainer.world_size", "1 with strategy 'single'", trainer.world_size, why)
    if config.placement == "colocated":
        if config.weights.transport == "nccl":
            why = "NCCL does not connect two processes on one GPU"
            yield _expected("weights.transport", "'ipc' with placement 'colocated'", "'nccl'", why)
        engine = config.engine
        gpus = engine.num_replicas * engine.world_size
        if trainer.world_size != gpus:
            replicas = "1 replica" if engine.num_replicas == 1 else f"{engine.num_replicas} replicas"
            why = f"one trainer rank on every GPU of the replicas: {replicas} of {engine.world_size}"
            yield _expected(
                "trainer.world_size", f"{gpus} with placement 'colocated'", trainer.world_size, why
            )
    elif config.weights.transport == "ipc":
        why = "CUDA IPC reaches only processes on the same GPU"
        yield _expected("placement", "'colocated' with transport 'ipc' and a trainer", "'separate'", why)
    yield from _schedule_rules(config)


def _schedule_rules(config: AppConfig) -> Iterator[str]:
    assert config.trainer is not None
    optimizer, name = config.trainer.optimizer, "trainer.optimizer.total_steps"
    if optimizer.schedule == "constant":
        return
    if optimizer.total_steps is None:
        yield _expected(
            name, f"a number with schedule {optimizer.schedule!r}", "none", "it says where to end"
        )
    elif optimizer.total_steps <= optimizer.warmup_steps:
        least = f"more than 'warmup_steps', {optimizer.warmup_steps}"
        yield _expected(name, least, optimizer.total_steps, "the warm-up is part of it")


def _extra_rules(config: AppConfig) -> Iterator[str]:
    own = {name: f"engine.{name}" for name in type(config.engine).model_fields} | RESERVED_ENGINE_ARGS
    for name in config.engine.extra:
        if name in own:
            yield f"'engine.extra.{name}': set '{own[name]}' instead (one place for each setting)"
    for name in config.engine.env:
        if name in RESERVED_VARIABLES:
            owner = RESERVED_VARIABLES[name]
            yield f"'engine.env.{name}': set '{owner}' instead (one place for each setting)"
