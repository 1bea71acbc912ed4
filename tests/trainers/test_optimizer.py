import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from trainers.optimizer import build_optimizer, learning_rate_factor
from trainers.settings import OptimizerConfig, Schedule

QUARTER = 0.5 * (1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"schedule": Schedule.LINEAR, "total_steps": 4}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ({"schedule": Schedule.COSINE, "total_steps": 4}, [1.0, QUARTER, 0.5, 1 - QUARTER, 0.0]),
    ],
)
def test_the_learning_rate_follows_warm_up_and_schedule(config: dict[str, Any], factors: list[float]) -> None:
    factor = learning_rate_factor(OptimizerConfig(**config))
    assert [factor(step) for step in range(len(factors))] == pytest.approx(factors)


def test_moments_of_8_bit_without_their_package_are_refused() -> None:
    if find_spec("torchao") is not None:
        pytest.skip("torchao is installed")
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"needs torchao.*pip install"):
        build_optimizer([weight], OptimizerConfig(moments="8bit"))
