from hypothesis import given, settings
from hypothesis import strategies as st

from app.jobs.run import Positions


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=20))
def test_a_resumed_run_gets_every_problem_that_was_not_consumed_and_no_other(
    rounds: list[tuple[int, int]],
) -> None:
    """Each round is a job: it takes some, consumes some of those in any order, and is killed."""
    consumed: list[int] = []
    positions = Positions()
    for taken, done in rounds:
        handed = [positions.hand_out() for _ in range(taken)]
        assert not set(handed) & set(consumed)
        finished = handed[::-1][:done]
        positions.consume(finished)
        consumed += finished
        positions = Positions(positions.next_problem, set(positions.ahead))
    assert len(set(consumed)) == len(consumed)
    rest = [positions.hand_out() for _ in range(5)]
    expected = [number for number in range(len(consumed) + 5) if number not in consumed]
    assert rest == expected[:5]
