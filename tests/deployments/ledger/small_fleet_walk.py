"""A walk through all states of a small fleet, and what it leaves out because it makes no difference.

    python -m tests.deployments.ledger.small_fleet_walk REPLICAS ROUNDS FAULTS LOADS

Three reductions, none of which loses a state that could be wrong (a test compares with the whole graph):

- Replicas that differ in their names alone are one (`small_fleet_state`).
- A poll whose answer says nothing new, and which tells the ledger nothing, is left out: its replica does
  nothing until the answer has come, and could as well have polled later.
- When no fault is left, an answer that arrives and changes nothing that a user sees is followed alone: it
  touches one replica, and whatever else can happen can happen after it as before. Every other message of that
  replica waits for it, so nothing is put off for ever.

The number of states depends on the order of the visit, by less than a hundredth: two states that differ in
the order of calls to several replicas count twice where both are reached. The ends do not depend on it.
"""

import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.deployments.ledger.small_fleet import Move, SmallFleet
from tests.deployments.ledger.small_fleet_state import key, ledger_key, says_nothing_new

REPORT_S = 20.0
FAULTS = ("die", "lose", "fail", "repeat", "restart", "forsake")
Trail = tuple["Trail", Move] | None


@dataclass(slots=True, kw_only=True)
class Walked:
    """Counts; `ends`: the states in which nothing more can happen."""

    states: int = 0
    moves: int = 0
    ends: set[int] = field(default_factory=set)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.states} states, {self.moves} moves, {len(self.ends)} ends, {self.seconds:.0f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """What one state leads to; `reached`: by which move, the key, and the state itself."""

    reached: list[tuple[Move, int, bytes]]
    moves: int
    end: int | None  # the key of a state in which nothing more can happen


def walk(count: int, rounds: int, faults: int, loads: int = 0, *, reduced: bool = True) -> Walked:
    """Visit all states; raises what does not hold, with the moves that lead there."""
    first = SmallFleet(count, rounds, faults, loads)
    walked, seen = Walked(), {hash(key(first))}
    todo: list[tuple[bytes, Trail]] = [(frozen(first), None)]
    began = said = time.monotonic()
    while todo:
        here, trail = todo.pop()
        expanded = expand(here, trail, reduced)
        walked.moves += expanded.moves
        if expanded.end is not None:
            walked.ends.add(expanded.end)
        for move, found, state in expanded.reached:
            if found not in seen:
                seen.add(found)
                todo.append((state, (trail, move)))
        walked.states, walked.seconds = len(seen), time.monotonic() - began
        if time.monotonic() - said > REPORT_S:
            said = time.monotonic()
            print(f"{walked}; {len(todo)} to do", file=sys.stderr, flush=True)
    return walked


def expand(state: bytes, trail: Trail, reduced: bool) -> Expanded:
    """Where one state leads to; raises what does not hold there."""
    quiet, moves = True, 0
    reached: dict[int, tuple[Move, int, bytes]] = {}
    for move, fleet, new in _next(state, trail, reduced):
        moves += 1
        quiet = quiet and (not new or move[0] in FAULTS)
        found = hash(key(fleet))
        if found not in reached:
            reached[found] = (move, found, frozen(fleet))
    end = None
    if quiet:
        last = pickle.loads(state)
        if not last.faults:
            end = hash(key(last))
        _attempt(last.check_end, trail)
    return Expanded(reached=list(reached.values()), moves=moves, end=end)


def frozen(fleet: SmallFleet) -> bytes:
    """A state to be continued from; without what nobody looks at."""
    fleet.ledger.state.events.clear()
    for seat in fleet.seats:
        seat.replica.ran.clear()
    return pickle.dumps(fleet, pickle.HIGHEST_PROTOCOL)


def _next(state: bytes, trail: Trail, reduced: bool) -> Iterator[tuple[Move, SmallFleet, bool]]:
    """The moves, where they lead, and whether anything is new there."""
    here: SmallFleet = pickle.loads(state)
    possible = list(here.moves())
    if reduced and not here.faults:
        seen_by_users = here.seen_by_users()
        for move in [each for each in possible if each[0] == "take"]:
            _attempt(lambda: here.make(move), (trail, move))  # noqa: B023
            if here.seen_by_users() == seen_by_users:
                yield move, here, True
                return
            here = pickle.loads(state)
    before, probe = ledger_key(here), here
    for move in possible:
        if move[0] == "poll":
            _attempt(lambda: probe.make(move), (trail, move))  # noqa: B023
            seat = probe.seats[move[1]]
            if says_nothing_new(seat) and ledger_key(probe) == before:
                seat.answer = None  # good for the next probe
                if reduced:
                    continue
                new = False
            else:
                probe, new = pickle.loads(state), True
        else:
            new = True
        fleet: SmallFleet = pickle.loads(state)
        _attempt(lambda: fleet.make(move), (trail, move))  # noqa: B023
        yield move, fleet, new


def _attempt(action: Callable[[], None], trail: Trail) -> None:
    try:
        action()
    except AssertionError as error:
        moves = []
        while trail is not None:
            trail, move = trail
            moves.append(move)
        error.add_note(f"after {moves[::-1]}")
        raise


if __name__ == "__main__":
    print(walk(*map(int, sys.argv[1:5])), flush=True)
