from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers import tiny
from trainers.learner import Learner, OutOfMemory
from trainers.settings import LearnerConfig, LoraConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy

CONFIG = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), max_tokens_per_microbatch=6)


class Failing:
    """The policy's own scores, until the n-th call raises."""

    def __init__(self, policy: TrainedPolicy, error: BaseException, after: int) -> None:
        self._scores: Callable[..., Any] = policy.scores
        self._error, self._left = error, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._left == 0:
            raise self._error
        self._left -= 1
        return self._scores(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "error", "after"),
    [
        (None, torch.OutOfMemoryError("CUDA out of memory"), 0),
        (None, RuntimeError("lost"), 1),
        (LoraConfig(name="a", rank=2), torch.OutOfMemoryError("CUDA out of memory"), 2),
    ],
)
def test_a_failed_step_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraConfig | None, error: Exception, after: int
) -> None:
    policy, other = tiny.policy(tmp_path), TrainedPolicy.load(tmp_path)
    if lora is not None:
        policy.adapt(lora, seed=0)
        other.adapt(lora, seed=0)
    learner, undisturbed = Learner(policy, CONFIG), Learner(other, CONFIG)
    learner.step(tiny.BATCH)
    undisturbed.step(tiny.BATCH)
    before = tiny.trained(policy)
    with monkeypatch.context() as patched:
        patched.setattr(policy, "scores", Failing(policy, error, after))
        with pytest.raises(RuntimeError):
            learner.step(tiny.BATCH)
    assert learner.steps_done == 1
    assert tiny.equal(before, tiny.trained(policy))
    mine, theirs = learner.step(tiny.BATCH), undisturbed.step(tiny.BATCH)
    assert {**mine, "step_s": 0} == {**theirs, "step_s": 0}
    assert tiny.equal(tiny.trained(policy), tiny.trained(other))


@pytest.mark.parametrize(("after", "fitted"), [(0, "none has fit yet"), (2, "the largest that fit had 6")])
def test_an_out_of_memory_error_names_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, fitted: str
) -> None:
    policy = tiny.policy(tmp_path)
    monkeypatch.setattr(policy, "scores", Failing(policy, torch.OutOfMemoryError("CUDA ..."), after))
    with pytest.raises(OutOfMemory, match=rf"a micro-batch of \d+ tokens: .*{fitted}") as caught:
        Learner(policy, CONFIG).step(tiny.BATCH)
    text = str(caught.value)
    assert "max_tokens_per_microbatch (6)" in text and "activation_checkpointing" in text
    assert "It changed nothing" in text
    assert caught.value.__context__ is None, "its frames would keep what the step has allocated"


def test_an_update_without_memory_ends_a_step_that_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, other = tiny.policy(tmp_path), TrainedPolicy.load(tmp_path)
    learner = Learner(policy, CONFIG.model_copy(update={"updates_per_step": 2}))
    with monkeypatch.context() as patched:
        patched.setattr(policy, "scores", Failing(policy, torch.OutOfMemoryError("CUDA ..."), 7))
        metrics = learner.step(tiny.BATCH)
    expected = Learner(other, CONFIG).step(tiny.BATCH)
    assert metrics["step"] == learner.steps_done == 1, "the weights have changed"
    assert metrics["loss"] == expected["loss"]
    assert tiny.equal(tiny.trained(policy), tiny.trained(other))
