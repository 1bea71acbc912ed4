"""AdamW and its learning-rate schedules."""

import math
from collections.abc import Callable, Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR

from trainers.settings import OptimizerConfig, Schedule

BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch's defaults
STEPS = "step"  # AdamW's count of a parameter's updates


def learning_rate_factor(config: OptimizerConfig) -> Callable[[int], float]:
    """The factor on the learning rate in step 0, 1, ...: a linear warm-up, then the schedule."""
    total, warmup = config.total_steps, config.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.schedule is Schedule.CONSTANT or total is None:
            return 1.0
        progress = min(1.0, (step - warmup) / (total - warmup))
        if config.schedule is Schedule.COSINE:
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return 1.0 - progress

    return factor


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW (Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101) and its schedule."""
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=config.weight_decay,
        fused=True,  # one pass over the memory; its count of steps lies beside the moments
    )
    return optimizer, LambdaLR(optimizer, learning_rate_factor(config))


@torch.no_grad()
def zero_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of a parameter before its first step, to read a checkpoint into."""
    return {
        STEPS: torch.zeros((), device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
