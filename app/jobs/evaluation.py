"""Evaluation on held-out problems, all of it at one version of the weights."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from app.jobs.attempts import Attempt
from app.jobs.environments.environment import HELD_OUT, Environment, all_of
from app.jobs.rollouts import Policy, Unanswered

# Problems from this number on are never trained on.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one version is worth."""

    version: int
    problems: int  # that were answered
    reward: float  # the mean over all attempts
    pass_at: dict[int, float]  # k -> the share of problems that k attempts solve
    kept_in: str | None = None  # the directory of the version, if it was the best so far

    def line(self) -> str:
        """For a person."""
        shares = "  ".join(f"pass@{k} {value:.3f}" for k, value in self.pass_at.items())
        return (
            f"version {self.version}, {self.problems} held-out problems: reward {self.reward:.3f}  {shares}"
        )


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """The probability that one of k attempts is right, where `solved` of `attempts` were.

    The unbiased estimator 1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", https://arxiv.org/abs/2107.03374, section 2.1.

    Raises:
        ValueError: not 0 <= solved <= attempts, or not 1 <= k <= attempts.
    """
    if not 0 <= solved <= attempts or not 1 <= k <= attempts:
        raise ValueError(
            f"pass@k needs 0 <= solved <= attempts and 1 <= k <= attempts, "
            f"got {solved}, {attempts} and k = {k}"
        )
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
    """Attempts at held-out problems, by the policy's version alone.

    Args:
        solved_from: an attempt with this reward or more is right.

    Raises:
        Moved: the fleet serves another version.
        Unanswered: no problem was.
        ValueError: the policy has no version.
        FleetError: the fleet refuses.
    """
    if policy.version is None:
        raise ValueError("an evaluation needs a policy of one version")
    free = asyncio.Semaphore(in_flight)
    reasons: list[str] = []

    async def one(number: int) -> Sequence[Attempt]:
        async with free:
            try:
                return await environment.attempts(HELD_OUT + number, attempts, policy)
            except Unanswered as error:
                reasons.append(str(error))
                return ()

    found = await all_of(one(number) for number in range(problems))
    answered = [made for made in found if made]
    if not answered:
        raise Unanswered(f"none of {problems} held-out problems was answered; the last one: {reasons[-1]}")
    return summarized(answered, policy.version, solved_from)


def summarized(answered: Sequence[Sequence[Attempt]], version: int, solved_from: float) -> Evaluation:
    """The evaluation of these attempts, as many at each problem; k are powers of two, and all."""
    counts = [(len(made), sum(attempt.reward >= solved_from for attempt in made)) for made in answered]
    most = min(made for made, _ in counts)
    ks = sorted({1 << i for i in range(most.bit_length()) if 1 << i <= most} | {most})
    rewards = [attempt.reward for made in answered for attempt in made]
    return Evaluation(
        version=version,
        problems=len(answered),
        reward=sum(rewards) / len(rewards),
        pass_at={k: sum(pass_at_k(n, c, k) for n, c in counts) / len(counts) for k in ks},
    )
