"""A walk through all states of a small fleet, and what it leaves out because it makes no difference.

    python -m tests.deployments.ledger.small_fleet_walk REPLICAS ROUNDS FAULTS

Three reductions, none of which loses a state that could be wrong (a test compares with the whole graph):

- Replicas that differ in their names alone are one (`small_fleet_state`).
- A poll whose answer says nothing new, and which tells the ledger nothing, is left out: its replica does
  nothing until the answer has come, and could as well have polled later.
- When no fault is left, an answer that arrives and changes nothing that a user sees is followed alone: it
  touches one replica, and whatever else can happen can happen after it as before. Every other message of that
  replica waits for it, so nothing is put off for ever.
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
    complete: bool = True

    def __str__(self) -> str:
        whole = "" if self.complete else ", NOT COMPLETE"
        return f"{self.states} states, {self.moves} moves, {len(self.ends)} ends, {self.seconds:.0f} s{whole}"


def walk(count: int, rounds: int, faults: int, *, reduced: bool = True, limit: int = 10**9) -> Walked:
    """Visit all states; raises what does not hold, with the moves that lead there."""
    began, walked = time.process_time(), Walked()
    first = SmallFleet(count, rounds, faults)
    seen = {hash(key(first))}
    todo: list[tuple[bytes, Trail]] = [(frozen(first), None)]
    said = began
    while todo:
        walked.states, walked.seconds = len(seen), time.process_time() - began
        if walked.seconds - said > REPORT_S:
            said = walked.seconds
            print(f"{walked}; {len(todo)} to do", file=sys.stderr, flush=True)
        if len(seen) >= limit:
            walked.complete = False
            break
        state, trail = todo.pop()
        quiet = True
        for move, fleet, new in _next(state, trail, reduced):
            walked.moves += 1
            quiet = quiet and (not new or move[0] in FAULTS)
            found = hash(key(fleet))
            if found not in seen:
                seen.add(found)
                todo.append((frozen(fleet), (trail, move)))
        if quiet:
            last = pickle.loads(state)
            if not last.faults:
                walked.ends.add(hash(key(last)))
            _attempt(last.check_end, trail)
    walked.states, walked.seconds = len(seen), time.process_time() - began
    return walked


def frozen(fleet: SmallFleet) -> bytes:
    """A state to be continued from; without what nobody looks at."""
    fleet.ledger._events._events.clear()
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
    print(walk(*map(int, sys.argv[1:4])), flush=True)
