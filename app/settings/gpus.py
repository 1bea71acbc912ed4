"""How many GPUs a configuration takes, compared with those of the Ray cluster before anything starts."""

import hashlib
import math
from collections.abc import Sequence

from app.settings.config import AppConfig, Device, Placement
from app.settings.errors import ConfigError
from deployments.placement import SlotPlan


def check_gpus(config: AppConfig, hosts: Sequence[float]) -> None:
    """
    Args:
        hosts: GPUs of each host of the cluster.

    Raises:
        ConfigError: there are too few, in the cluster or on one host; with the numbers.
    """
    if config.device is not Device.CUDA:
        return
    needed, on_one_host = total_gpus(config), gpus_on_one_host(config)
    present, largest = sum(hosts), max(hosts, default=0.0)
    if present < needed:
        raise ConfigError(
            f"this configuration needs {needed} GPUs ({_account(config)}), "
            f"but the Ray cluster has {present:g}"
        )
    if largest < on_one_host:
        raise ConfigError(
            f"this configuration needs {on_one_host} GPUs on one host ({_account(config)}), but the largest "
            f"host of the Ray cluster has {largest:g} of its {present:g}"
        )


def total_gpus(config: AppConfig) -> int:
    engine, trainer = config.engine, config.trainer
    ranks = engine.num_replicas * engine.world_size
    if config.placement is Placement.COLOCATED:
        return ranks
    share = ranks * engine.gpus_per_rank
    if trainer is not None:
        share += trainer.world_size * trainer.gpus_per_rank
    return math.ceil(share)


def gpus_on_one_host(config: AppConfig) -> int:
    engine = config.engine
    together = engine.num_replicas if config.placement is Placement.COLOCATED else 1
    return together * engine.world_size


def slot_plan(config: AppConfig) -> SlotPlan | None:
    """The slots of a colocated fleet, named after its state directory, of which each fleet has its own."""
    if config.placement is not Placement.COLOCATED or config.trainer is None:
        return None
    digest = hashlib.sha256(str(config.state_dir).encode()).hexdigest()[:12]
    return SlotPlan(
        name=f"slipstream-{digest}",
        slots=config.engine.num_replicas,
        gpus_per_slot=config.engine.world_size,
        engine_share=config.engine.gpus_per_rank,
        trainer_share=config.trainer.gpus_per_rank,
    )


def _account(config: AppConfig) -> str:
    engine, trainer = config.engine, config.trainer
    text = f"engine.num_replicas {engine.num_replicas} of {engine.world_size} ranks"
    if config.placement is Placement.COLOCATED:
        return f"{text}, shared with the trainer"
    text += f" of {engine.gpus_per_rank:g} GPU"
    if trainer is not None:
        text += f", and {trainer.world_size} ranks of the trainer of {trainer.gpus_per_rank:g}"
    return text
