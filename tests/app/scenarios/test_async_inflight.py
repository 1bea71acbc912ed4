"""How continuations are compared with those of a fresh engine."""

from collections.abc import Sequence

from app.scenarios.async_inflight import Comparison, Running, compare
from app.scenarios.fresh_engine import FreshAnswer
from trainers.trajectory import VersionSpan


def request(first: int) -> Running:
    spans = [VersionSpan(version=1, start=0, end=2), VersionSpan(version=2, start=2, end=5)]
    return Running(prompt=[first], tokens=[first, 1, 2, 3, 4], logprobs=[-1.0] * 5, spans=spans)


class Engine:
    """Answers as it is told: by prompt, and by how many requests share a batch."""

    def __init__(self, answers: dict[tuple[int, int], list[int]]) -> None:
        self._answers = answers
        self.asked: list[tuple[list[int], int]] = []
        self.logprobs = [-1.0] * 3

    def __call__(self, requests: Sequence[Running], at_once: int) -> list[FreshAnswer]:
        self.asked.append(([each.prompt[0] for each in requests], at_once))
        tokens = [self._answers.get((each.prompt[0], at_once), [2, 3, 4]) for each in requests]
        return [FreshAnswer(token_ids=each, logprobs=self.logprobs) for each in tokens]


def test_equal_answers_are_asked_for_once() -> None:
    engine = Engine({})
    assert compare([request(7), request(8)], engine) == [Comparison(before=2, total=5, differs_at=None)] * 2
    assert engine.asked == [([7, 8], 2)]


def test_a_different_answer_is_asked_for_again_alone() -> None:
    engine = Engine({(8, 3): [2, 9, 9], (9, 3): [2, 3, 9], (9, 1): [2, 3, 9]})
    fine, batch, fleet = compare([request(7), request(8), request(9)], engine)
    assert engine.asked == [([7, 8, 9], 3), ([8, 9], 1)]
    assert (fine.differs_at, fine.alone_differs_at) == (None, None)
    assert (batch.differs_at, batch.alone_differs_at) == (3, 3), "the engine disagrees with itself"
    assert (fleet.differs_at, fleet.alone_differs_at) == (4, None), "the engine agrees with itself"


def test_log_probabilities_say_where_equal_answers_drift_apart_and_by_how_much() -> None:
    engine = Engine({(8, 2): [2, 3, 9]})
    engine.logprobs = [-1.0, -1.25, -3.0]
    same, other = compare([request(7), request(8)], engine)
    assert (same.differs_at, same.drifts_at, same.first_drift, same.largest_drift) == (None, 3, 0.25, 2.0)
    assert (other.differs_at, other.drifts_at, other.largest_drift) == (4, 3, 0.25), (
        "other tokens say nothing"
    )
