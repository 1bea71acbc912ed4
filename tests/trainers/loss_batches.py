"""Learned tokens made of plain lists."""

import torch

from trainers.losses import LearnedTokens


def tokens(
    current: list[float],
    *,
    old: list[float] | None = None,
    rollout: list[float] | None = None,
    advantages: list[float] | None = None,
    lengths: list[int] | None = None,
    reference: list[float] | None = None,
    versions: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> LearnedTokens:
    """By default on policy, and one answer with an advantage of 1."""

    def tensor(values: list[float] | None, default: list[float]) -> torch.Tensor:
        return torch.tensor(default if values is None else values, dtype=dtype)

    logprobs = tensor(current, []).requires_grad_()
    counts = torch.tensor([len(current)] if lengths is None else lengths)
    return LearnedTokens(
        logprobs=logprobs,
        old_logprobs=tensor(old, current),
        rollout_logprobs=tensor(rollout, current if old is None else old),
        advantages=tensor(advantages, [1.0] * len(current)),
        completions=torch.arange(len(counts)).repeat_interleave(counts),
        lengths=counts,
        versions=torch.tensor([-1] * len(current) if versions is None else versions),
        reference_logprobs=None if reference is None else tensor(reference, []),
        teacher_logprobs=tensor(old, current)[:, None],
        logprobs_of_teachers=logprobs[:, None],
    )


def random_tokens(
    lengths: list[int], *, seed: int = 0, drift: float = 0.1, dtype: torch.dtype = torch.float64
) -> LearnedTokens:
    """Tokens whose ratios lie on both sides of any clip; one advantage for each answer."""
    draw = torch.Generator().manual_seed(seed)
    old = -torch.rand(sum(lengths), generator=draw, dtype=torch.float64) * 3 - 0.5
    noise = torch.randn(3, sum(lengths), generator=draw, dtype=torch.float64) * drift
    each = torch.randn(len(lengths), generator=draw, dtype=torch.float64)
    current, rollout, reference = (old + row for row in noise)
    return tokens(
        current.tolist(),
        old=old.tolist(),
        rollout=rollout.tolist(),
        reference=reference.tolist(),
        advantages=each.repeat_interleave(torch.tensor(lengths)).tolist(),
        lengths=lengths,
        dtype=dtype,
    )


def gradient(values: torch.Tensor, of: LearnedTokens) -> list[float]:
    (found,) = torch.autograd.grad(values.sum(), of.logprobs)
    made: list[float] = found.tolist()
    return made
