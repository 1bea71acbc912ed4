"""Random walks over the ledger of rollouts.

Calls are refused, undone and repeated, the ledger is loaded again from what was saved, trainers ask again for
their steps. Which calls are refused is in `test_rollout_ledger`.
"""

from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.protocol.errors import SlipstreamError
from deployments.rollouts.rollout_ledger import NewTurn, Record, RolloutLedger, State
from tests.deployments.rollouts.turns import LIMITS, request

ROLLOUTS = ["a", "b", "c"]
IDS = st.sampled_from(ROLLOUTS)
GROUPS = st.sampled_from([None, None, "g", "r.0", "r.1"])
RUNS = st.sampled_from(["", "r"])
LATER = {
    State.OPEN: {State.REWARDED, State.CONSUMED, State.DISCARDED},
    State.REWARDED: {State.CONSUMED, State.DISCARDED},
    State.CONSUMED: set[State](),
    State.DISCARDED: set[State](),
}


class Walk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.calls, self.steps, self.begun = 0.0, 0, 0, 0
        self.ledger = RolloutLedger(LIMITS)
        self.disk: dict[tuple[str, str], Record] = {}
        self.lives: dict[str, int] = {}  # id -> which of its lives
        self.told: dict[str, set[str]] = {}  # a step's note -> the lives that it learns from
        self.learned: list[str] = []
        self.before: dict[str, State] = {}

    def save(self) -> None:
        for place, record in self.ledger.changes().items():
            self.disk.pop(place, None) if record is None else self.disk.__setitem__(place, record)
        self.ledger.saved()

    def states(self) -> dict[str, State]:
        found = {}
        for name in ROLLOUTS:
            try:
                found[name] = self.ledger.state(name)
            except SlipstreamError:
                continue
        return found

    def seen(self) -> object:
        """What callers can ask."""
        run, opened, ready = self.ledger.position("r", self.now)
        return self.ledger.counts(self.now), self.states(), run, set(opened), ready

    def call(self, change: Callable[[], object], *, undone: bool = False) -> bool:
        """Whether it was saved. A call that was refused or undone leaves nothing behind."""
        before = self.seen()
        self.save()
        try:
            change()
        except SlipstreamError:
            undone = True
        if undone:
            self.ledger.undo()
            assert self.seen() == before
        self.save()
        return not undone

    @rule(seconds=st.sampled_from([1, 4, 4, 10, 10, 60]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.ledger.tick(self.now)
        self.save()

    @rule()
    def restart(self) -> None:
        before, self.ledger = self.seen(), RolloutLedger(LIMITS)
        for record in self.disk.values():
            self.ledger.load(record)
        assert self.seen() == before

    @rule(name=IDS, group=GROUPS, size=st.integers(0, 3), undone=st.booleans())
    def open(self, name: str, group: str | None, size: int, undone: bool) -> None:
        if group is not None and group != "g" and int(group[-1]) >= self.begun:
            return  # it would be none of the run
        is_new = name not in self.states()
        asked = request(name, group=group, size=size if group is not None else 0)
        if self.call(lambda: self.ledger.open(asked, self.now), undone=undone) and is_new:
            self.lives[name] = self.lives.get(name, 0) + 1

    @rule(name=IDS, group=GROUPS)
    def play(self, name: str, group: str | None) -> None:
        """Walks would else hardly come to what trainers do."""
        self.open(name, group, 2, undone=False)
        self.append(name, "x")
        self.reward(name, undone=False)

    @rule(undone=st.booleans())
    def begin(self, undone: bool) -> None:
        self.begun += self.call(lambda: self.ledger.begin("r", self.begun, 1, self.now), undone=undone)

    @rule(number=st.integers(0, 3), members=st.sets(IDS, max_size=2), undone=st.booleans())
    def settle(self, number: int, members: set[str], undone: bool) -> None:
        """A job settles its group, and sends the call again."""
        rewards = dict.fromkeys(members, 1.0)
        if self.call(lambda: self.ledger.settle(f"r.{number}", rewards, "left out", self.now), undone=undone):
            before = self.seen()
            self.ledger.settle(f"r.{number}", rewards, "left out", self.now)
            assert self.seen() == before

    @rule(name=IDS, turn=st.sampled_from("xyz"))
    def append(self, name: str, turn: str) -> None:
        new = NewTurn(
            request=turn, attempt=0, prompt=1, sampled=1, policy="", version=1, digest=lambda n: turn[:n]
        )
        self.call(lambda: self.ledger.append(name, "", new))

    @rule(name=IDS, undone=st.booleans())
    def reward(self, name: str, undone: bool) -> None:
        self.call(lambda: self.ledger.reward(name, "", 1.0, self.now), undone=undone)

    @rule(name=IDS)
    def discard(self, name: str) -> None:
        self.call(lambda: self.ledger.discard(name, "", self.now))

    @rule(run=RUNS, count=st.integers(1, 2), back=st.integers(0, 2), undone=st.booleans())
    def take(self, run: str, count: int, back: int, undone: bool) -> None:
        """A new step, or one that was lost after it had asked, perhaps with another trainer's name."""
        self.steps += back == 0
        self.calls += 1
        note, found = f"{self.calls}", []

        def ask() -> None:
            name = f"s{self.steps - back}"
            found.append(self.ledger.take(name, run, count, None, note, {}, self.now)[0])

        if not self.call(ask, undone=undone) or (taken := found[0]) is None:
            return
        told = [[each.key for each in self.ledger.rewarded(key)] for key in taken.groups]
        assert all(told), "a group without a reward"
        lives = {f"{each} {self.lives[each]}" for each in chain(*told)}
        if taken.note == note:
            assert len(taken.groups) == count
            self.told[note] = lives
            self.learned += lives
        assert self.told[taken.note] == lives, "the same step has the same answer"

    @invariant()
    def no_rollout_is_learned_from_twice(self) -> None:
        assert len(self.learned) == len(set(self.learned))

    @invariant()
    def no_rollout_goes_back(self) -> None:
        states = self.states()
        for name, state in states.items():
            before = self.before.get(name, state)
            assert state is before or state in LATER[before], name
        self.before = states

    @invariant()
    def every_number_of_a_run_is_open_or_ready_or_has_one_end(self) -> None:
        run, opened, ready = self.ledger.position("r", self.now)
        assert run.next == self.begun == len(opened) + ready + sum(run.ends.values())


SEARCH = not settings().derandomize  # in `make test-all`; else a few, which are always the same
TestWalk = pytest.mark.slow(Walk.TestCase)
TestWalk.settings = settings(
    max_examples=settings().max_examples if SEARCH else 60, stateful_step_count=50, deadline=None
)
