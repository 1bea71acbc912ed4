"""Random orders of messages in small fleets, with faults: no state is wrong, and every walk ends."""

import random

import pytest

from tests.deployments.ledger.small_fleet import CALM, Move, SmallFleet

FAULT = 0.1  # the probability that any move is drawn, and not one that is no fault
pytestmark = pytest.mark.timeout(900)  # they compute, and share their core


def walk(seed: int, replicas: int, rounds: int, faults: int, loads: int, names: str = "n") -> None:
    """From the start to some state, and from there without a further fault to an end."""
    drawn = random.Random(seed)
    fleet, moves = SmallFleet(replicas, rounds, faults, loads, names), list[Move]()
    try:
        for _ in range(drawn.randrange(1, 15 * (rounds + loads * len(names)) * replicas)):
            possible = list(fleet.moves())
            calm = [each for each in possible if each[0] in CALM]
            if not possible:
                break
            moves.append(drawn.choice(calm if calm and drawn.random() > FAULT else possible))
            fleet.make(moves[-1])
        fleet.check_end()
    except AssertionError as error:
        error.add_note(f"seed {seed}: {moves}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "rounds", "faults", "loads"),
    [(3, 2, 0, 0), (2, 1, 1, 0), (2, 0, 1, 1), (2, 1, 0, 1), (2, 1, 2, 1)],
)
def test_no_state_of_a_small_fleet_is_wrong_or_stuck(
    replicas: int, rounds: int, faults: int, loads: int
) -> None:
    for seed in range(150):
        walk(seed, replicas, rounds, faults, loads)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "rounds", "faults"), [(2, 1, 1), (3, 0, 1)])
def test_adapters_of_several_names_do_not_disturb_each_other(replicas: int, rounds: int, faults: int) -> None:
    for seed in range(150):
        walk(seed, replicas, rounds, faults, loads=2, names="mn")


@pytest.mark.long
@pytest.mark.parametrize(
    ("replicas", "rounds", "faults", "loads"),
    [(3, 2, 1, 0), (2, 2, 2, 0), (3, 1, 2, 0), (3, 0, 1, 2), (2, 0, 2, 2), (3, 1, 2, 1)],
)
def test_larger_fleets_and_more_faults(replicas: int, rounds: int, faults: int, loads: int) -> None:
    first = random.SystemRandom().randrange(10**9)
    for seed in range(first, first + 2000):
        walk(seed, replicas, rounds, faults, loads)
