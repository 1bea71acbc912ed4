"""AdamW and learning-rate schedules on torch's own implementations."""

import math
from collections.abc import Callable, Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR

from trainers.settings import OptimizerConfig, Schedule


def learning_rate_factor(config: OptimizerConfig) -> Callable[[int], float]:
    """The factor on the learning rate in step 0, 1, ...: a linear warm-up, then the schedule."""
    total, warmup = config.total_steps, config.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.schedule is Schedule.CONSTANT or total is None:
            return 1.0
        progress = min(1.0, (step - warmup) / (total - warmup))
        remaining = 1.0 - progress
        if config.schedule is Schedule.COSINE:
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.final_fraction + (1.0 - config.final_fraction) * remaining

    return factor


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW (Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101) and its schedule."""
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,  # one pass over the memory; its count of steps lies beside the moments
    )
    return optimizer, LambdaLR(optimizer, learning_rate_factor(config))
