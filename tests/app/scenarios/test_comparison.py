"""How continuations are compared with those of a fresh engine."""

from collections.abc import Sequence

from app.scenarios.comparison import Comparison, Drift, compare
from app.scenarios.fresh_engine import ScoredTokens

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
    assert compare(SWITCHES, CONTINUED, engine) == [Comparison(before=2, after=3)] * 3
    assert engine.asked == [([0, 1, 2], 3)]


def test_a_different_answer_is_asked_for_again_alone() -> None:
    engine = Engine({(1, 3): [2, 9, 9], (2, 3): [2, 3, 9], (2, 1): [2, 3, 9]})
    fine, batch, fleet = compare(SWITCHES, CONTINUED, engine)
    assert engine.asked == [([0, 1, 2], 3), ([1, 2], 1)]
    assert (fine.differs_at, fine.alone_differs_at) == (None, None)
    assert (batch.differs_at, batch.alone_differs_at) == (3, 3), "the engine disagrees with itself"
    assert (fleet.differs_at, fleet.alone_differs_at) == (4, None), "the engine agrees with itself"
    assert (
        batch.sentence() == "not from token 3 on (a fresh engine's own answer alone neither, from token 3 on)"
    )


def test_log_probabilities_say_where_answers_drift_apart_and_by_how_much() -> None:
    engine = Engine({(1, 3): [2, 9, 4]})
    engine.logprobs = [-1.0, -1.25, -3.0]
    same, other, _ = compare(SWITCHES, CONTINUED, engine, drifting_alone=True)
    assert engine.asked == [([0, 1, 2], 3), ([0, 1, 2], 1)], "whatever drifts is asked for again"
    assert (same.differs_at, same.drift) == (None, Drift(at=3, tokens=2, first=0.25, largest=2.0))
    assert (other.differs_at, other.drift) == (3, Drift(at=3, tokens=1, first=0.25, largest=0.25))
    assert same.alone_drift is None, "the engine's own answers are the same"
    assert same.sentence() == "yes; log-probabilities of 2 tokens, from token 3 on, by up to 2"
