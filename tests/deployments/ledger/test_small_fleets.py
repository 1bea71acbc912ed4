import pytest

from tests.deployments.ledger.small_fleet_walk import walk

pytestmark = pytest.mark.timeout(900)  # they compute, and share their core


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "rounds", "faults", "loads", "states"),
    [
        (3, 2, 0, 0, 500),
        (2, 1, 1, 0, 500),
        (2, 0, 1, 1, 900),
        pytest.param(2, 2, 1, 0, 2000, marks=pytest.mark.long),
        pytest.param(2, 1, 0, 1, 1500, marks=pytest.mark.long),
        pytest.param(2, 0, 1, 2, 1500, marks=pytest.mark.long),
    ],
)
def test_no_state_of_a_small_fleet_is_wrong_or_stuck(
    count: int, rounds: int, faults: int, loads: int, states: int
) -> None:
    walked = walk(count, rounds, faults, loads)
    assert walked.states > states and walked.ends, "the walk does not go far"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "rounds", "faults", "loads"),
    [(2, 2, 0, 0), (2, 0, 0, 1), pytest.param(2, 1, 1, 0, marks=pytest.mark.long)],
)
def test_what_the_walk_leaves_out_makes_no_difference(
    count: int, rounds: int, faults: int, loads: int
) -> None:
    reduced, whole = walk(count, rounds, faults, loads), walk(count, rounds, faults, loads, reduced=False)
    assert reduced.states < whole.states and reduced.ends == whole.ends


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(
    ("count", "rounds", "faults", "loads"),
    [(3, 2, 1, 0), (2, 2, 2, 0), (3, 1, 2, 0), (2, 1, 1, 1), (3, 0, 1, 2), (2, 0, 2, 2)],
)
def test_larger_fleets_and_more_faults(count: int, rounds: int, faults: int, loads: int) -> None:
    print(walk(count, rounds, faults, loads))
