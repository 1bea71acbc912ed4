import asyncio
from collections.abc import Sequence
from itertools import combinations
from typing import Any, cast

import pytest

from app.jobs.environments.environment import HELD_OUT
from app.jobs.evaluation import evaluate, pass_at_k, summarized
from app.jobs.groups import Rollout
from app.jobs.policy import Moved, Policy, Unanswered


@pytest.mark.parametrize(("attempts", "solved"), [(4, 0), (4, 1), (5, 3), (4, 4)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_have_a_right_one(
    attempts: int, solved: int, k: int
) -> None:
    draws = list(combinations([number < solved for number in range(attempts)], k))
    assert pass_at_k(attempts, solved, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def rollout(reward: float) -> Rollout:
    return Rollout(trajectories=[], reward=reward, text="x")


def test_a_summary_has_the_reward_and_pass_at_k_for_powers_of_two_and_all() -> None:
    made = summarized([[rollout(1.0), rollout(0.5), rollout(0.0)], [rollout(0.0)] * 3], 3, solved_from=0.5)
    assert made.reward == pytest.approx(0.25) and made.problems == 2
    assert made.pass_at == {1: pytest.approx(1 / 3), 2: pytest.approx(0.5), 3: pytest.approx(0.5)}
    assert "pass@3 0.500" in made.line()


class Exam:
    """The first problem is never answered."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.most = self.now = 0
        self.moved = False

    problems = 1 << 40

    async def rollouts(self, number: int, count: int, policy: Policy) -> Sequence[Rollout]:
        self.asked.append(number)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if self.moved:
            raise Moved("expected answers of version 3")
        if number == HELD_OUT:
            raise Unanswered("deadly")
        return [rollout(1.0)] * count


def policy(version: int) -> Policy:
    return Policy(client=cast(Any, None), model="m", max_tokens=1, version=version)


async def test_held_out_problems_are_attempted_so_many_at_a_time() -> None:
    exam = Exam()
    options = {"problems": 5, "attempts": 2, "in_flight": 2}
    made = await evaluate(exam, policy(3), **options, solved_from=1.0)
    assert sorted(exam.asked) == [HELD_OUT + number for number in range(5)] and exam.most == 2
    assert made.problems == 4 and made.version == 3 and made.pass_at == {1: 1.0, 2: 1.0}
    with pytest.raises(Unanswered, match="none of 1 held-out problems was answered; the last one: deadly"):
        await evaluate(exam, policy(3), **options | {"problems": 1}, solved_from=1.0)
    exam.moved = True
    with pytest.raises(Moved):
        await evaluate(exam, policy(3), **options, solved_from=1.0)
