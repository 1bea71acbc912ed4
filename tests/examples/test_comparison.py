"""How continuations are compared with those of a fresh engine."""

from collections.abc import Sequence

from examples.comparison import AnswerComparison, Difference, compare
from examples.fresh_engine import ScoredTokens

SWITCHES = [2, 2, 2]
CONTINUED = [ScoredTokens(token_ids=[2, 3, 4], logprobs=[-1.0, -1.0, -1.0])] * 3


class Engine:
    """Answers as it is told, by the request's number and by how many share a batch; else as the fleet did."""

    def __init__(self, answers: dict[tuple[int, int], list[int]]) -> None:
        self._answers = answers
        self.asked: list[tuple[list[int], int]] = []
        self.logprobs = [-1.0] * 3

    def __call__(self, indices: Sequence[int], at_once: int) -> list[ScoredTokens]:
        self.asked.append((list(indices), at_once))
        tokens = [self._answers.get((index, at_once), [2, 3, 4]) for index in indices]
        return [ScoredTokens(token_ids=each, logprobs=self.logprobs) for each in tokens]


def test_equal_answers_are_asked_for_once() -> None:
    engine = Engine({})
    assert (
        compare(SWITCHES, CONTINUED, engine) == [AnswerComparison(before=2, after=3, fleet=Difference())] * 3
    )
    assert engine.asked == [([0, 1, 2], 3)]


def test_a_different_answer_is_asked_for_again_alone() -> None:
    engine = Engine({(1, 3): [2, 9, 9], (2, 3): [2, 3, 9], (2, 1): [2, 3, 9]})
    _, batch, fleet = compare(SWITCHES, CONTINUED, engine)
    assert engine.asked == [([0, 1, 2], 3), ([1, 2], 1)]
    assert (batch.fleet, batch.engine) == (Difference(differs_at=3), Difference(differs_at=3))
    assert (fleet.fleet, fleet.engine) == (Difference(differs_at=4), Difference())
    assert (
        batch.sentence() == "not from token 3 on (a fresh engine's own answer alone neither, from token 3 on)"
    )


def test_log_probabilities_show_where_answers_drift_apart_and_by_how_much() -> None:
    engine = Engine({(1, 3): [2, 9, 4]})
    engine.logprobs = [-1.0, -1.25, -3.0]
    same, other, _ = compare(SWITCHES, CONTINUED, engine)
    assert engine.asked == [([0, 1, 2], 3), ([0, 1, 2], 1)]
    assert same.fleet == Difference(drifts_at=3, drifting=2, drift=2.0)
    assert other.fleet == Difference(differs_at=3, drifts_at=3, drifting=1, drift=0.25)
    assert same.engine == Difference(), "the engine's own answers are the same"
    assert same.sentence() == "yes; log-probabilities of 2 tokens, from token 3 on, by up to 2"
