"""AdamW and its learning-rate schedules, by torch, or by torchao with 8-bit moments.

8-bit moments (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861) are codes of a byte each, and a scale
per block of 256. `torch.distributed.checkpoint` cannot copy torchao's tensor class, so checkpoints have codes
and scales as tensors of their own, sharded by rows. Moments whose rows are not whole blocks are not kept in 8
bit.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from trainers.settings import OptimizerConfig, Schedule

BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch's defaults
BLOCK = 256
STEPS = "step"  # AdamW's count of a parameter's updates
CODES, SCALE = "_codes", "_scale"  # after AdamW's name of a moment


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
    """AdamW (Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101) and its schedule. Raises
    ValueError if torchao is needed and not installed."""
    if config.moments == "8bit":
        optimizer = _adamw_8bit(list(parameters), config)
    else:
        optimizer = torch.optim.AdamW(
            parameters,
            lr=config.learning_rate,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=config.weight_decay,
            fused=True,  # one pass over the memory; its count of steps lies beside the moments
        )
    return optimizer, LambdaLR(optimizer, learning_rate_factor(config))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao's, which takes no other
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def zero_moments(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of a parameter before its first step, to read a checkpoint into."""
    if isinstance(optimizer, torch.optim.AdamW):
        steps, new = torch.zeros((), device=parameter.device), partial(torch.zeros_like, parameter)
        return {STEPS: steps, "exp_avg": new(), "exp_avg_sq": new()}
    return _zero_moments_8bit(optimizer, parameter)


def _adamw_8bit(parameters: list[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(
            "'trainer.optimizer.moments' is '8bit', which needs torchao: expected the package to be "
            f"installed (pip install 'torchao>=0.18,<0.19'), got {error}"
        ) from error

    class Optimizer(AdamW8bit):
        """Its moments are full where a block would reach over two rows."""

        def _new_buffer(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
            if parameter.ndim < 2 or parameter[0].numel() % BLOCK:
                return torch.zeros_like(parameter)
            made: torch.Tensor = super()._new_buffer(parameter, signed)
            return made

    made: torch.optim.Optimizer = Optimizer(
        parameters,
        lr=config.learning_rate,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=config.weight_decay,
        block_size=BLOCK,
    )
    return made


def _zero_moments_8bit(optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        STEPS: torch.zeros(()),
        "exp_avg": optimizer._new_buffer(parameter, True),
        "exp_avg_sq": optimizer._new_buffer(parameter, False),
    }


def as_plain(kind: str, moment: torch.Tensor) -> dict[str, torch.Tensor]:
    """A moment as plain tensors, which share its memory, by name; `kind` is AdamW's name of it."""
    local: Any = moment.to_local() if isinstance(moment, DTensor) else moment
    if not hasattr(local, "codes"):
        return {kind: moment}
    scale = local.scale.view(len(local), -1)
    return {kind + CODES: _like(moment, local.codes), kind + SCALE: _like(moment, scale)}


def _like(moment: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a tensor that is sharded by rows as the moment is."""
    if not isinstance(moment, DTensor):
        return local
    shape = torch.Size((len(moment), *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, moment.device_mesh, moment.placements, run_check=False, shape=shape, stride=stride
    )
