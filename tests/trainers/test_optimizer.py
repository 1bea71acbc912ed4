import math
from importlib.util import find_spec

import pytest
import torch

from trainers.optimizer import build_optimizer, learning_rate_factor
from trainers.settings import LoraConfig, OptimizerConfig, Schedule, TrainerConfig


def factors(config: OptimizerConfig, steps: int) -> list[float]:
    factor = learning_rate_factor(config)
    return [factor(step) for step in range(steps)]


def test_a_warm_up_rises_linearly_from_above_zero() -> None:
    assert factors(OptimizerConfig(warmup_steps=3), 5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_falls_to_zero_and_stays() -> None:
    config = OptimizerConfig(schedule=Schedule.LINEAR, total_steps=4)
    assert factors(config, 6) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    config = OptimizerConfig(schedule=Schedule.COSINE, total_steps=4)
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    assert factors(config, 5) == pytest.approx([1.0, quarter, 0.5, 1 - quarter, 0.0])


def test_the_first_step_of_adamw_moves_by_the_learning_rate() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    optimizer, _ = build_optimizer([weight], OptimizerConfig(learning_rate=0.1))
    weight.grad = torch.tensor([3.0, -0.2])
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9, -0.9], abs=1e-5)


def test_moments_of_8_bit_without_their_package_are_refused() -> None:
    if find_spec("torchao") is not None:
        pytest.skip("torchao is installed")
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"needs torchao.*pip install"):
        build_optimizer([weight], OptimizerConfig(moments="8bit"))


def test_an_adapter_has_full_moments() -> None:
    with pytest.raises(ValueError, match="expected 'full' with 'lora', got '8bit'"):
        TrainerConfig(lora=LoraConfig(name="a"), optimizer=OptimizerConfig(moments="8bit"))
