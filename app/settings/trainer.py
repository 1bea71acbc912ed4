"""From the configuration's sections to what the trainer deployment is started with."""

from app.settings.config import AppConfig, StagingPlace, TrainerConfig
from deployments.trainer.spec import Strategy, TrainerSpec
from trainers.learner import LearnerConfig
from trainers.losses import Aggregation, LossConfig
from trainers.optimizer import OptimizerConfig, Schedule


def trainer_spec(args: AppConfig, trainer: TrainerConfig, model: str) -> TrainerSpec:
    """
    Args:
        model: the checkpoint directory that `args.model` resolved to.
    """
    optimizer = trainer.optimizer.model_dump() | {"schedule": Schedule(trainer.optimizer.schedule)}
    loss = trainer.loss.model_dump() | {"aggregation": Aggregation(trainer.loss.aggregation)}
    return TrainerSpec(
        model=model,
        store_dir=str(args.store_path),
        keep=args.store.keep,
        transport=args.weights.transport.value,
        chunk_bytes=args.weights.sent_chunk_bytes,
        native=args.weights.staging is StagingPlace.NONE,
        strategy=Strategy(trainer.strategy.value),
        world_size=trainer.world_size,
        device=args.device.value,
        dtype=trainer.dtype,
        wire_dtype=trainer.wire_dtype,
        learner=LearnerConfig(
            optimizer=OptimizerConfig(**optimizer),
            loss=LossConfig(**loss),
            max_grad_norm=trainer.max_grad_norm,
            micro_batch_tokens=trainer.max_tokens_per_microbatch,
        ),
        seed=trainer.seed,
        gpus_per_rank=trainer.gpus_per_rank,
        cpu_threads=trainer.cpu_threads,
        start_timeout_s=trainer.start_timeout_s,
        step_timeout_s=trainer.step_timeout_s,
    )
