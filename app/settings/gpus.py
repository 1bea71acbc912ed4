import math
from collections.abc import Sequence

from app.settings.config import AppConfig
from app.settings.section import ConfigError, Device, Placement
from deployments.weights.transports.registry import SameGpu


def check_gpus(config: AppConfig, hosts: Sequence[float], of: str = "a Ray cluster") -> None:
    """Raises ConfigError if GPUs are too few, or Ray may place a replica out of the transport's reach.
    `hosts`: GPUs per host."""
    if config.device is not Device.CUDA:
        return
    needed, on_one_host = total_gpus(config), gpus_on_one_host(config)
    present, largest = sum(hosts), max(hosts, default=0.0)
    if present < needed:
        raise ConfigError(
            f"expected {of} with at least {needed} GPUs ({_breakdown(config)}), got one with {present:g}"
        )
    if largest < on_one_host:
        raise ConfigError(
            f"expected {of} with at least {on_one_host} GPUs on one host ({_breakdown(config)}), "
            f"got {largest:g} of {present:g} on its largest host"
        )
    with_gpus = sum(count > 0 for count in hosts)
    if with_gpus > 1 and _needs_one_host(config):
        transport = config.weights.transport
        raise ConfigError(
            f"'weights.transport': expected 'nccl' with placement 'separate' and GPUs on {with_gpus} hosts, "
            f"got {transport!r} (it connects the GPUs of one host, and Ray places replicas on any)"
        )


def _needs_one_host(config: AppConfig) -> bool:
    """Only a one-host cluster ensures that trainer and replicas share a host."""
    together = config.weights.transport_record.same_gpu is SameGpu.POSSIBLE
    return together and config.trainer is not None and config.placement is Placement.SEPARATE


def total_gpus(config: AppConfig) -> int:
    engine = config.engine
    ranks = engine.first_replicas * engine.world_size
    if config.placement is Placement.COLOCATED:
        return ranks
    return math.ceil(ranks * engine.gpus_per_rank + trainer_gpus(config))


def replica_gpus(config: AppConfig) -> float:
    """0 if colocated: the replica takes a slot."""
    if config.device is Device.CPU or config.placement is Placement.COLOCATED:
        return 0.0
    return config.engine.gpus_per_rank * config.engine.world_size


def trainer_gpus(config: AppConfig) -> float:
    trainer = config.trainer
    if trainer is None or config.placement is Placement.COLOCATED:
        return 0.0
    return trainer.world_size * trainer.gpus_per_rank


def gpus_on_one_host(config: AppConfig) -> int:
    engine = config.engine
    together = engine.first_replicas if config.placement is Placement.COLOCATED else 1
    return together * engine.world_size


def _breakdown(config: AppConfig) -> str:
    engine, trainer = config.engine, config.trainer
    text = f"engine.num_replicas {engine.first_replicas} of {engine.world_size} ranks"
    if config.placement is Placement.COLOCATED:
        return f"{text}, shared with the trainer"
    text += f" of {engine.gpus_per_rank:g} GPU"
    if trainer is not None:
        text += f", and {trainer.world_size} ranks of the trainer of {trainer.gpus_per_rank:g}"
    return text
