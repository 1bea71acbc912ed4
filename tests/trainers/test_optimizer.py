import math
from typing import Any

import pytest

from trainers.learner import learning_rate_at
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
    made = OptimizerConfig(learning_rate=1.0, **config)
    assert [learning_rate_at(step, made) for step in range(len(factors))] == pytest.approx(factors)
