import asyncio
from collections.abc import Sequence
from itertools import combinations
from typing import Any, cast

import pytest

from app.client.completions import Answer
from app.jobs.attempts import Attempt
from app.jobs.evaluation import HELD_OUT, evaluate, pass_at_k, summarized
from app.jobs.rollouts import Moved, Policy, Sampling, Unanswered
from trainers.trajectory import VersionSpan


@pytest.mark.parametrize(("attempts", "solved"), [(4, 0), (4, 1), (5, 3), (4, 4)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_have_a_right_one(
    attempts: int, solved: int, k: int
) -> None:
    draws = list(combinations([number < solved for number in range(attempts)], k))
    assert pass_at_k(attempts, solved, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


@pytest.mark.parametrize(("attempts", "solved", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_numbers_that_cannot_be_are_refused(attempts: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(attempts, solved, k)


def attempt(reward: float, version: int = 3) -> Attempt:
    spans = [VersionSpan(version=version, start=0, end=1)]
    answer = Answer(text="x", token_ids=[1], logprobs=[-1.0], weight_versions=spans)
    return Attempt.of_answer([1], answer, reward)


def test_a_summary_has_the_reward_and_pass_at_k_for_powers_of_two_and_all() -> None:
    made = summarized([[attempt(1.0), attempt(0.5), attempt(0.0)], [attempt(0.0)] * 3], 3, solved_from=0.5)
    assert made.reward == pytest.approx(0.25) and made.problems == 2
    assert made.pass_at == {1: pytest.approx(1 / 3), 2: pytest.approx(0.5), 3: pytest.approx(0.5)}
    assert "pass@3 0.500" in made.line()


class Exam:
    """The first problem is never answered."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.most = self.now = 0
        self.moved = False

    async def attempts(self, number: int, count: int, policy: Policy) -> Sequence[Attempt]:
        self.asked.append(number)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if self.moved:
            raise Moved("expected answers of version 3")
        if number == HELD_OUT:
            raise Unanswered("deadly")
        return [attempt(1.0)] * count


def policy(version: int | None) -> Policy:
    sampling = Sampling(answers=1, max_tokens=1)
    return Policy(client=cast(Any, None), model="m", sampling=sampling, version=version)


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
    with pytest.raises(ValueError, match="of one version"):
        await evaluate(exam, policy(None), **options, solved_from=1.0)
