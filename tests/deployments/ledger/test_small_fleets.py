import pytest

from tests.deployments.ledger.small_fleet_walk import walk

pytestmark = pytest.mark.timeout(900)  # they compute, and share their core


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "rounds", "faults", "states"),
    [(3, 2, 0, 500), (2, 1, 1, 500), pytest.param(2, 2, 1, 2000, marks=pytest.mark.long)],
)
def test_no_state_of_a_small_fleet_is_wrong_or_stuck(
    count: int, rounds: int, faults: int, states: int
) -> None:
    walked = walk(count, rounds, faults)
    assert walked.states > states and walked.ends, "the walk does not go far"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "rounds", "faults"), [(2, 2, 0), pytest.param(2, 1, 1, marks=pytest.mark.long)]
)
def test_what_the_walk_leaves_out_makes_no_difference(count: int, rounds: int, faults: int) -> None:
    reduced, whole = walk(count, rounds, faults), walk(count, rounds, faults, reduced=False)
    assert reduced.states < whole.states and reduced.ends == whole.ends


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(("count", "rounds", "faults"), [(3, 2, 1), (2, 2, 2), (3, 1, 2)])
def test_larger_fleets_and_more_faults(count: int, rounds: int, faults: int) -> None:
    print(walk(count, rounds, faults))
