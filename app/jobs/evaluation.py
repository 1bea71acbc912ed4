"""Evaluation of one version on held-out problems."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import fmean

from app.jobs.environments.environment import HELD_OUT, Environment
from app.jobs.groups import Rollout, figures
from app.jobs.policy import Policy, Unanswered
from app.jobs.task_groups import all_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    version: int
    problems: int
    reward: float
    pass_at: dict[int, float]  # k -> share of problems solved in k attempts
    reward_std: float = 0.0
    reward_by_source: Mapping[str, float] = field(default_factory=dict)
    cut_fraction: float = 0.0
    answer_tokens_mean: float = 0.0
    kept_in: str | None = None  # if it was the best so far

    def line(self) -> str:
        shares = "  ".join(f"pass@{k} {value:.3f}" for k, value in self.pass_at.items())
        return (
            f"version {self.version}, {self.problems} held-out problems: reward {self.reward:.3f}  {shares}"
        )


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """The unbiased estimate, 1 - C(n - c, k) / C(n, k): Chen et al. 2021, https://arxiv.org/abs/2107.03374,
    section 2.1."""
    assert 0 <= solved <= attempts and 1 <= k <= attempts
    return 1.0 - comb(attempts - solved, k) / comb(attempts, k)


async def evaluate(
    environment: Environment,
    policy: Policy,
    *,
    problems: int,
    attempts: int,
    in_flight: int,
    solved_from: float,
) -> Evaluation:
    """Raises Moved; Unanswered if no problem was answered."""
    assert policy.version is not None
    free = asyncio.Semaphore(in_flight)
    reasons: list[str] = []

    async def one(number: int) -> Sequence[Rollout]:
        async with free:
            try:
                return await environment.rollouts(HELD_OUT + number, attempts, policy)
            except Unanswered as error:
                reasons.append(str(error))
                return ()

    found = await all_of(one(number) for number in range(problems))
    answered = [rollouts for rollouts in found if rollouts]
    if not answered:
        raise Unanswered(f"none of {problems} held-out problems was answered; the last one: {reasons[-1]}")
    return summarized(answered, policy.version, solved_from)


def summarized(answered: Sequence[Sequence[Rollout]], version: int, solved_from: float) -> Evaluation:
    counts = [(len(made), sum(rollout.reward >= solved_from for rollout in made)) for made in answered]
    most = min(made for made, _ in counts)
    ks = sorted({1 << i for i in range(most.bit_length()) if 1 << i <= most} | {most})
    return Evaluation(
        version=version,
        problems=len(answered),
        pass_at={k: fmean(pass_at_k(n, c, k) for n, c in counts) for k in ks},
        **figures([rollout for made in answered for rollout in made]),
    )
