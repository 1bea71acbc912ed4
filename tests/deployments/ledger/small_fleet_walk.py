"""A walk through all states of a small fleet, and what it leaves out because it makes no difference.

    python -m tests.deployments.ledger.small_fleet_walk REPLICAS ROUNDS FAULTS [PROCESSES [SECONDS]]

Several processes expand states side by side; the first alone knows which were seen. Three reductions, none of
which loses a state that could be wrong (a test compares with the whole graph):

- Replicas that differ in their names alone are one (`small_fleet_state`).
- A poll whose answer says nothing new, and which tells the ledger nothing, is left out: its replica does
  nothing until the answer has come, and could as well have polled later.
- When no fault is left, an answer that arrives and changes nothing that a user sees is followed alone: it
  touches one replica, and whatever else can happen can happen after it as before. Every other message of that
  replica waits for it, so nothing is put off for ever.

The number of states depends on the order of the visit, by less than a hundredth: two states that differ in
the order of calls to several replicas count twice where both are reached. The ends do not depend on it.
"""

import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from tests.deployments.ledger.small_fleet import Move, SmallFleet
from tests.deployments.ledger.small_fleet_state import key, ledger_key, says_nothing_new

REPORT_S = 20.0
CHUNK = 64  # states that a process expands at a time
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """What one state leads to; `reached`: by which move, the key, and the state itself."""

    reached: list[tuple[Move, int, bytes]]
    moves: int
    end: int | None  # the key of a state in which nothing more can happen


class Walk:
    """States that were seen, and those to go on from."""

    def __init__(self, first: SmallFleet) -> None:
        self.walked = Walked()
        self.todo: list[tuple[bytes, Trail]] = [(frozen(first), None)]
        self._seen = {hash(key(first))}
        self._began = self._said = time.monotonic()

    def take_in(self, trail: Trail, expanded: Expanded) -> None:
        """What the state at the end of a trail leads to."""
        self.walked.moves += expanded.moves
        if expanded.end is not None:
            self.walked.ends.add(expanded.end)
        for move, found, state in expanded.reached:
            if found not in self._seen:
                self._seen.add(found)
                self.todo.append((state, (trail, move)))
        self.walked.states, self.walked.seconds = len(self._seen), time.monotonic() - self._began
        if self.walked.seconds - self._said > REPORT_S:
            self._said = self.walked.seconds
            print(f"{self.walked}; {len(self.todo)} to do", file=sys.stderr, flush=True)


def walk(count: int, rounds: int, faults: int, *, reduced: bool = True) -> Walked:
    """Visit all states; raises what does not hold, with the moves that lead there."""
    walk = Walk(SmallFleet(count, rounds, faults))
    while walk.todo:
        state, trail = walk.todo.pop()
        walk.take_in(trail, expand(state, trail, reduced))
    return walk.walked


def walk_together(
    count: int, rounds: int, faults: int, *, processes: int, limit_s: float = float("inf")
) -> Walked:
    """As `walk`, by several processes; after `limit_s` what is known by then."""
    walk = Walk(SmallFleet(count, rounds, faults))
    running: dict[Future[list[Expanded]], list[tuple[bytes, Trail]]] = {}
    # Forked: keys are hashes, and hashes of text differ between processes that start by themselves.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        while walk.todo or running:
            if walk.walked.seconds > limit_s:
                walk.walked.complete = False
                pool.shutdown(wait=True, cancel_futures=True)
                break
            while walk.todo and len(running) < 2 * processes:
                size = min(CHUNK, 1 + len(walk.todo) // processes)
                chunk, walk.todo[-size:] = walk.todo[-size:], []
                running[pool.submit(_expand_chunk, [state for state, _ in chunk])] = chunk
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                chunk = running.pop(future)
                if isinstance(future.exception(), AssertionError):  # here again, where the trails are known
                    results = [expand(state, trail, reduced=True) for state, trail in chunk]
                else:
                    results = future.result()
                for (_, trail), expanded in zip(chunk, results, strict=True):
                    walk.take_in(trail, expanded)
    return walk.walked


_returned: set[int] = set()  # what this process has returned: a large part of what it reaches


def _expand_chunk(states: Sequence[bytes]) -> list[Expanded]:
    results = []
    for state in states:
        expanded = expand(state, None, reduced=True)
        new = [each for each in expanded.reached if each[1] not in _returned]
        _returned.update(found for _, found, _ in new)
        results.append(Expanded(reached=new, moves=expanded.moves, end=expanded.end))
    return results


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
    fleet.ledger.state.events.events.clear()
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
    sizes = list(map(int, sys.argv[1:4]))
    if len(sys.argv) > 4:
        limit_s = float(sys.argv[5]) if len(sys.argv) > 5 else float("inf")
        print(walk_together(*sizes, processes=int(sys.argv[4]), limit_s=limit_s), flush=True)
    else:
        print(walk(*sizes), flush=True)
