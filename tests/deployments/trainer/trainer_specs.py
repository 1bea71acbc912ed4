"""Trainer specs for tests: a small trainer on one CPU thread."""

from dataclasses import replace
from pathlib import Path

from deployments.trainer.spec import TrainerSpec
from trainers.settings import TrainerConfig


def trainer_spec(
    model: str | Path = "m",
    store_dir: str | Path = "s",
    *,
    transport: str = "shm",
    device: str = "cpu",
    chunk_bytes: int = 1 << 20,
    config: TrainerConfig | None = None,
) -> TrainerSpec:
    return TrainerSpec(
        model=str(model),
        store_dir=str(store_dir),
        transport=transport,
        device=device,
        chunk_bytes=chunk_bytes,
        native=False,
        config=TrainerConfig() if config is None else config,
    )


def with_config(spec: TrainerSpec, **changes: object) -> TrainerSpec:
    """The spec with other settings, validated as those of a configuration are."""
    return replace(spec, config=TrainerConfig(**(spec.config.model_dump() | changes)))
