"""Every order of messages in a small fleet, with a fault at every point: no state is wrong or stuck."""

import time
from dataclasses import dataclass

import pytest

from tests.deployments.ledger.small_fleet import Move, SmallFleet
from tests.deployments.ledger.small_fleet_state import key


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    states: int
    moves: int
    ends: int
    seconds: float


def walk(count: int, rounds: int, faults: int, limit: int = 10**9) -> Walked:
    """Visit all states; raises what does not hold, with the moves that lead there."""
    began = time.process_time()
    seen = set()
    todo: list[tuple[Move, ...]] = [()]
    moves = ends = 0
    while todo and len(seen) < limit:
        path = todo.pop()
        fleet = SmallFleet(count, rounds, faults)
        try:
            for move in path:
                fleet.make(move)
            moves += 1
            ended = False
            while True:
                state = hash(key(fleet))
                if state in seen:
                    break
                seen.add(state)
                possible = list(fleet.moves())
                todo += [(*path, move) for move in possible[1:]]
                ended = fleet.step == "end"
                ends += ended
                if not possible:
                    break
                path = (*path, possible[0])
                fleet.make(possible[0])
                moves += 1
            if ended:
                fleet.check_end()
        except AssertionError as error:
            error.add_note(f"after {path}")
            raise
    return Walked(states=len(seen), moves=moves, ends=ends, seconds=time.process_time() - began)


@pytest.mark.timeout(900)  # it computes, and shares its core
@pytest.mark.parametrize(("rounds", "faults", "states"), [(2, 0, 500), (1, 1, 4000)])
def test_two_replicas(rounds: int, faults: int, states: int) -> None:
    walked = walk(2, rounds, faults)
    assert walked.states > states and walked.ends, "the walk does not go far"


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("count", "rounds", "faults"), [(2, 2, 1), (3, 2, 1), (2, 1, 2)])
def test_larger_fleets_and_more_faults(count: int, rounds: int, faults: int) -> None:
    """As far as half an hour goes: the largest have more states."""
    print(walk(count, rounds, faults, limit=200_000))
