"""Our losses and TRL's own code agree on the same log-probabilities, masks and advantages."""

from typing import Any

import pytest
import torch

from tests.clients.environments import run
from trainers.losses import LOSSES, LearnedTokens, policy_loss, token_weights
from trainers.settings import LossConfig

pytestmark = [pytest.mark.clients, pytest.mark.long, pytest.mark.timeout(1200)]
ANSWERS, TOKENS = 8, 24
CLIPS = {"epsilon": 0.2, "epsilon_high": 0.2, "beta": 0.0}
# Our settings, TRL's, and what TRL calls them.
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "ppo_clip"}, CLIPS | {"loss_type": "bnpo"}),
    ({"name": "grpo"}, CLIPS | {"loss_type": "grpo"}),
    ({"name": "reinforce_pp"}, CLIPS | {"loss_type": "grpo"}),
    ({"name": "dr_grpo", "max_tokens": 31}, CLIPS | {"loss_type": "dr_grpo", "max_completion_length": 31}),
    ({"name": "dapo"}, CLIPS | {"loss_type": "dapo", "epsilon_high": 0.28}),
    (
        {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04},
        CLIPS
        | {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.03,
            "epsilon_high": 0.04,
        },
    ),
    ({"name": "cispo", "clip_high": 0.5}, CLIPS | {"loss_type": "cispo", "epsilon_high": 1.5}),
    (
        {"name": "grpo", "kl_coefficient": 0.04},
        CLIPS | {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    ),
    (
        {"name": "dapo", "kl_coefficient": 0.04, "kl_estimator": "k3_unbiased"},
        CLIPS | {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04},
    ),
]
NAMES = [" ".join(map(str, ours.values())) for ours, _ in PAIRS]


def padded_batch() -> dict[str, torch.Tensor]:
    """float64 [ANSWERS, TOKENS]; some tokens are masked in the middle, and ratios lie beyond every clip."""
    draw = torch.Generator().manual_seed(3)
    shape = (ANSWERS, TOKENS)
    old = -torch.rand(shape, generator=draw, dtype=torch.float64) * 4
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, length in enumerate([24, 3, 1, 17, 9, 24, 12, 5]):
        mask[row, :length] = True
    mask[0, 6:11] = False
    mask[3, :4] = False
    logprobs, rollout, reference = (
        old + scale * torch.randn(shape, generator=draw, dtype=torch.float64) for scale in (0.3, 0.5, 0.2)
    )
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "reference_logprobs": reference,
        "mask": mask,
        "advantages": torch.randn(ANSWERS, generator=draw, dtype=torch.float64),
    }


def ours(batch: dict[str, torch.Tensor], config: LossConfig) -> tuple[float, torch.Tensor]:
    """The loss, and its gradient in the batch's padded form."""
    mask = batch["mask"]
    lengths = mask.sum(1)
    answers = torch.arange(ANSWERS).repeat_interleave(lengths)
    flat = {name: batch[name][mask] for name in batch if name.endswith("logprobs")}
    tokens = LearnedTokens(
        **(flat | {"logprobs": flat["logprobs"].requires_grad_()}),
        advantages=batch["advantages"][answers],
        completions=answers,
        lengths=lengths,
        versions=torch.full_like(answers, -1),
    )
    made = policy_loss(tokens, config, LOSSES[config.name])
    weights = token_weights(lengths, int(lengths.sum()), ANSWERS, config)
    loss = (made.values * weights[answers]).sum()
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    padded = torch.zeros(ANSWERS, TOKENS, dtype=torch.float64)
    padded[mask] = gradient
    return float(loss.detach()), padded


@pytest.fixture(scope="module", params=[False, True], ids=["as sampled", "corrected for the rollout policy"])
def trl(request: pytest.FixtureRequest) -> tuple[bool, list[dict[str, Any]]]:
    """Whether importance weights are applied, and TRL's losses in the order of `PAIRS`."""
    batch = {name: values.tolist() for name, values in padded_batch().items()}
    settings = [theirs for _, theirs in PAIRS]
    found: Any = run("trl", "trl_losses", "", batch=batch, settings=settings, corrected=request.param)
    return request.param, found


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=NAMES)
def test_loss_and_gradient_are_trls(trl: tuple[bool, list[dict[str, Any]]], number: int) -> None:
    is_corrected, theirs = trl
    config = LossConfig(**PAIRS[number][0], importance_cap=2.0 if is_corrected else None)
    loss, gradient = ours(padded_batch(), config)
    expected = torch.tensor(theirs[number]["gradient"], dtype=torch.float64)
    print(
        f"{config.name}: loss {loss:.8f}, TRL {theirs[number]['loss']:.8f}, "
        f"gradient {float((gradient - expected).abs().max()):.1e} apart"
    )
    assert loss == pytest.approx(theirs[number]["loss"], abs=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
    assert float(expected.abs().max()) > 1e-3


BETAS = [0.0, 0.1, 0.5, 1.0]


@pytest.fixture(scope="module")
def gkd() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[dict[str, Any]]]:
    """Logits of student and teacher, float64 [2, 12, 50], labels, and TRL's losses by `BETAS`."""
    draw = torch.Generator().manual_seed(5)
    student, teacher = 3 * torch.randn(2, 2, 12, 50, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 50, (2, 12), generator=draw)
    labels[0, :4] = labels[1, 9:] = -100
    given = {"student": student.tolist(), "teacher": teacher.tolist(), "labels": labels.tolist()}
    found: Any = run("trl", "trl_gkd", "", betas=BETAS, **given)
    return student, teacher, labels, found


@pytest.mark.parametrize("number", range(len(BETAS)), ids=map(str, BETAS))
def test_the_divergence_to_a_teacher_is_gkds(gkd: Any, number: int) -> None:
    """Where the teacher says its log-probabilities of the whole vocabulary."""
    student, teacher, labels, theirs = gkd
    beta = BETAS[number]
    name = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    mask, logits = labels != -100, student.clone().requires_grad_()
    best = teacher[mask].log_softmax(-1).topk(50)
    none, lengths = torch.zeros(len(best.values)), mask.sum(1)
    tokens = LearnedTokens(
        **dict.fromkeys(("logprobs", "old_logprobs", "rollout_logprobs", "advantages"), none),
        completions=torch.arange(2).repeat_interleave(lengths),
        lengths=lengths,
        versions=torch.full_like(none, -1, dtype=torch.int64),
        teacher_logprobs=best.values,
        logprobs_of_teachers=logits[mask].log_softmax(-1).gather(-1, best.indices),
    )
    config = LossConfig(name=name, beta=beta)
    weights = token_weights(lengths, int(lengths.sum()), 2, config)[tokens.completions]
    loss = (policy_loss(tokens, config, LOSSES[name]).values * weights).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = torch.tensor(theirs[number]["gradient"], dtype=torch.float64)
    print(
        f"{name}, beta {beta}: loss {loss:.8f}, TRL {theirs[number]['loss']:.8f}, "
        f"gradient {float((gradient - expected).abs().max()):.1e} apart"
    )
    assert float(loss.detach()) == pytest.approx(theirs[number]["loss"], abs=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
    assert float(expected.abs().max()) > 1e-3


def test_rloos_gradient_is_trls(trl: tuple[bool, list[dict[str, Any]]]) -> None:
    """Without importance weights, which TRL's has none of. The values differ: ours is REINFORCE's."""
    expected = torch.tensor(trl[1][-1]["gradient"], dtype=torch.float64)
    _, gradient = ours(padded_batch(), LossConfig(name="rloo", importance_cap=None))
    print(f"rloo: gradient {float((gradient - expected).abs().max()):.1e} apart")
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
