"""What the trainer deployment is started with, from the sections of the configuration."""

from app.settings.config import AppConfig
from app.settings.weights import StagingMode
from deployments.trainer.spec import TrainerSpec
from trainers.settings import TrainerConfig


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
