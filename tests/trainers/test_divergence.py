"""Divergences to a teacher: of tokens, of a step, and a teacher that does not fit."""

from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainers import tiny
from tests.trainers.learning import ANSWERS, CONFIG, PROMPT, on_policy, with_changes
from trainers.batching import collate
from trainers.learner import Learner
from trainers.losses import LearnedTokens, divergence
from trainers.settings import LossConfig, OptimizerConfig
from trainers.teachers import check_teachers
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import TeacherLogprobs, Trajectory, parse_trajectories
from trainers.trajectory_arrays import from_bytes, to_bytes

LOSSES = [LossConfig(name="forward_kl"), LossConfig(name="reverse_kl"), LossConfig(name="jsd", beta=0.3)]
NAMES = [each.name for each in LOSSES]
of_each_loss = pytest.mark.parametrize("config", LOSSES, ids=NAMES)
TOKENS, VOCABULARY = 6, 9


def drawn(seed: int, *, sharp: float = 2.0) -> torch.Tensor:
    """float64 [TOKENS, VOCABULARY], log-probabilities."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, VOCABULARY, generator=draw, dtype=torch.float64)
    return (logits * sharp).log_softmax(-1)


def learned(current: torch.Tensor, teacher: torch.Tensor, top_k: int) -> LearnedTokens:
    best = teacher.topk(top_k)
    flat = torch.zeros(TOKENS)
    return LearnedTokens(
        logprobs=flat,
        old_logprobs=flat,
        rollout_logprobs=flat,
        advantages=flat,
        completions=torch.zeros(TOKENS, dtype=torch.int64),
        lengths=torch.tensor([TOKENS]),
        versions=torch.full((TOKENS,), -1),
        teacher_logprobs=best.values,
        logprobs_of_teachers=current.gather(-1, best.indices),
    )


def written_out(current: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    p, q = teacher.exp(), current.exp()
    if beta in (0.0, 1.0):
        return (p * (teacher - current)).sum(-1) if beta == 0.0 else (q * (current - teacher)).sum(-1)
    m = beta * p + (1 - beta) * q
    return (beta * p * (teacher - m.log()) + (1 - beta) * q * (current - m.log())).sum(-1)


@of_each_loss
def test_of_the_whole_vocabulary_it_is_the_divergence_written_out(config: LossConfig) -> None:
    current, teacher = drawn(0), drawn(1)
    made = divergence(learned(current, teacher, VOCABULARY), config).values
    torch.testing.assert_close(made, written_out(current, teacher, config.beta), rtol=0, atol=1e-6)


@of_each_loss
@pytest.mark.parametrize("top_k", [1, 4])
def test_the_tail_is_one_token(config: LossConfig, top_k: int) -> None:
    current, teacher = drawn(0), drawn(1)
    order = teacher.argsort(-1, descending=True)

    def merged(logprobs: torch.Tensor) -> torch.Tensor:
        of_order = logprobs.gather(-1, order)
        return torch.cat([of_order[:, :top_k], of_order[:, top_k:].logsumexp(-1, keepdim=True)], -1)

    made = divergence(learned(current, teacher, top_k), config).values
    torch.testing.assert_close(made, written_out(merged(current), merged(teacher), config.beta))
    assert (made <= written_out(current, teacher, config.beta)).all() and (made > 0).all()


@of_each_loss
@pytest.mark.parametrize(("ours", "theirs"), [(0, 1), (1, 1), (0, 0)])
def test_a_certain_model_has_a_finite_gradient(config: LossConfig, ours: int, theirs: int) -> None:
    """float32 has no room for the rest beside a probability of 1."""
    logits = torch.zeros(TOKENS, VOCABULARY)
    logits[:, ours] = 200.0
    current = logits.requires_grad_().log_softmax(-1)
    teacher = torch.zeros(TOKENS, VOCABULARY)
    teacher[:, theirs] = 200.0
    values = divergence(learned(current, teacher.log_softmax(-1), 3), config).values
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert values.isfinite().all() and gradient.isfinite().all()
    assert (values.abs().max() < 1e-5) == (ours == theirs)


def taught(batch: list[Trajectory], teacher: TrainedPolicy, top_k: int) -> list[Trajectory]:
    made = []
    for each in batch:
        with torch.no_grad():
            logits = teacher.model(input_ids=torch.tensor([each.prompt_token_ids + each.token_ids])).logits
        best = logits[0, len(PROMPT) - 1 : -1].log_softmax(-1).topk(top_k)
        ids, logprobs = best.indices.int().numpy().tobytes(), best.values.numpy().tobytes()
        made.append(replace(each, teacher=TeacherLogprobs(top_k=top_k, token_ids=ids, logprobs=logprobs)))
    return made


@of_each_loss
def test_a_steps_gradient_is_that_of_the_whole_vocabulary(tmp_path: Path, config: LossConfig) -> None:
    policy, plain = tiny.policy(tmp_path / "student"), TrainedPolicy.load(tmp_path / "student")
    teacher = tiny.policy(tmp_path / "teacher", seed=1)
    first, *rest = on_policy(policy, ANSWERS)
    batch = [replace(first, loss_mask=(False,) + (True,) * (len(first.token_ids) - 1)), *rest]
    batch = from_bytes(to_bytes(taught(batch, teacher, tiny.SIZES["vocab_size"])))
    values = []
    for each in batch:
        ids = torch.tensor([each.prompt_token_ids + each.token_ids])
        current, theirs = (one.model(input_ids=ids).logits[0].log_softmax(-1) for one in (plain, teacher))
        of_answer = slice(len(PROMPT) - 1, -1)
        found = written_out(current[of_answer], theirs.detach()[of_answer], config.beta)
        values.append(found[torch.tensor(each.loss_mask or [True] * len(found))])
    expected = torch.cat(values).mean()
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.model.parameters() if p.grad is not None])
    metrics = Learner(policy, CONFIG.model_copy(update={"loss": config})).step(batch)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)


@of_each_loss
def test_steps_bring_the_policy_to_its_teacher(tmp_path: Path, config: LossConfig) -> None:
    policy, teacher = tiny.policy(tmp_path / "student"), tiny.policy(tmp_path / "teacher", seed=1)
    learner = Learner(policy, with_changes(loss=config, optimizer=OptimizerConfig(learning_rate=3e-3)))
    losses = [learner.step(taught(on_policy(policy, ANSWERS), teacher, 8))["loss"] for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


TEACHER = TeacherLogprobs(
    top_k=2,
    token_ids=np.array([[5, 6], [7, 8], [9, 10]], np.int32).tobytes(),
    logprobs=np.log([[0.5, 0.2], [0.9, 0.1], [0.1, 0.1]]).astype(np.float32).tobytes(),
)
ONE = replace(tiny.trajectory((3, 4), (5, 6, 1)), teacher=TEACHER)


def parse(entry: Any) -> list[Trajectory]:
    parsed = parse_trajectories([entry], vocabulary_size=40, max_length=64)
    check_teachers(parsed, LossConfig(), 40)
    return parsed


def as_json(**changed: object) -> dict[str, object]:
    given = {"top_k": 2, "token_ids": TEACHER.token_ids, "logprobs": TEACHER.logprobs} | changed
    coded = {
        name: b64encode(each).decode() if isinstance(each, bytes) else each for name, each in given.items()
    }
    return {
        **{"prompt_token_ids": [3, 4], "token_ids": [5, 6, 1], "logprobs": [-1.0] * 3, "advantage": 1.0},
        "teacher": coded,
    }


def test_a_teacher_is_read_as_it_was_written() -> None:
    assert parse(as_json()) == [ONE]
    assert from_bytes(to_bytes([ONE, ONE])) == [ONE, ONE]
    assert from_bytes(to_bytes([ONE, replace(ONE, teacher=None)]))[0].teacher is None
    batch = collate([ONE, ONE], [(0, 1)], pad_token_id=0, device=torch.device("cpu"))
    assert batch.teacher_token_ids is not None and batch.teacher_token_ids.tolist()[3:] == [
        [5, 6],
        [7, 8],
        [9, 10],
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"top_k": 3},
            "trajectory 0: teacher: expected 36 bytes .* for 3 at each of 3 tokens, got 24",
        ),
        ({"top_k": 0}, "teacher.top_k: Input should be greater than or equal to 1"),
        ({"token_ids": np.full(6, 40, np.int32).tobytes()}, r"must lie in \[0, 40\), got 40 to 40"),
        ({"token_ids": np.full(6, 7, np.int32).tobytes()}, "must differ, got one twice"),
        ({"logprobs": np.full(6, np.nan, np.float32).tobytes()}, "must be finite numbers, got NaN"),
        ({"logprobs": np.zeros(6, np.float32).tobytes()}, "must have a sum of at most 1, got 2.000"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(as_json(**changed))


def test_a_loss_without_a_teacher_says_of_which_trajectory() -> None:
    check_teachers([ONE, ONE], LossConfig(name="jsd"), 40)
    check_teachers([ONE, replace(ONE, teacher=None)], LossConfig(), 40)
    with pytest.raises(
        ValueError, match=r"trajectory 1: teacher: the loss 'jsd' expects .* got none, and 2 of"
    ):
        check_teachers([ONE, replace(ONE, teacher=None)], LossConfig(name="jsd"), 40)


def test_arrays_of_a_teacher_belong_together() -> None:
    from safetensors.numpy import load, save

    arrays = load(to_bytes([ONE]))
    with pytest.raises(ValueError, match=r"expected both \[3, top_k\], got \[2, 2\] and \[3, 2\]"):
        from_bytes(save(arrays | {"teacher_token_ids": arrays["teacher_token_ids"][:2]}))


def test_beta_belongs_to_jsd_alone() -> None:
    assert LossConfig(name="reverse_kl").beta == 1.0 and LossConfig(name="jsd").beta == 0.5
    with pytest.raises(ValueError, match="'beta': expected none with the loss 'forward_kl'"):
        LossConfig(name="forward_kl", beta=0.2)
    with pytest.raises(ValueError, match="'beta': expected none with the loss 'grpo'"):
        LossConfig(name="grpo", beta=0.2)
