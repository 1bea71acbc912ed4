"""AdamW and learning-rate schedules, torch's own."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.optim.lr_scheduler import LambdaLR


class Schedule(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    total_steps: int | None = None  # where a decaying schedule ends; required for linear and cosine
    final_fraction: float = 0.0  # of the learning rate, at total_steps and after


def learning_rate_factor(config: OptimizerConfig) -> Callable[[int], float]:
    """The factor on the learning rate in step 0, 1, ...: a linear warm-up, then the schedule."""
    total, warmup, schedule = config.total_steps, config.warmup_steps, Schedule(config.schedule)
    if schedule is not Schedule.CONSTANT and (total is None or total <= warmup):
        raise ValueError(
            f"schedule {schedule.value!r} needs total_steps above warmup_steps ({warmup}), got {total}"
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if schedule is Schedule.CONSTANT or total is None:
            return 1.0
        progress = min(1.0, (step - warmup) / (total - warmup))
        left = 1.0 - progress
        if schedule is Schedule.COSINE:
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.final_fraction + (1.0 - config.final_fraction) * left

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
    )
    return optimizer, LambdaLR(optimizer, learning_rate_factor(config))
