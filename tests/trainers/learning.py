"""A learner's settings, and batches of what its policy answers itself."""

from typing import Any

import torch

from tests.trainers import tiny
from trainers.settings import LearnerConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import Trajectory

CONFIG = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=3))
PROMPT = (3, 4, 5)


def with_changes(**changes: Any) -> LearnerConfig:
    return LearnerConfig(**(CONFIG.model_dump() | changes))


def on_policy(policy: TrainedPolicy, answers: dict[tuple[int, ...], float]) -> list[Trajectory]:
    """Trajectories whose log-probabilities are the policy's own."""
    made = []
    for answer, advantage in answers.items():
        ids = torch.tensor([PROMPT + answer])
        with torch.no_grad():
            logprobs = torch.log_softmax(policy.model(input_ids=ids).logits[0].float(), -1)
        own = tuple(float(logprobs[len(PROMPT) - 1 + i, token]) for i, token in enumerate(answer))
        made.append(tiny.trajectory(PROMPT, answer, advantage=advantage, logprobs=own))
    return made


ANSWERS = {(6, 7, 1): 1.0, (8, 1): -1.0, (9, 10, 11): 0.5}
