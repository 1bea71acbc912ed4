"""Random walks over the ledger of rollouts.

Calls are refused, undone and repeated, the ledger is loaded again from what was saved, trainers ask again for
their steps. Which calls are refused is in `test_rollout_ledger`.
"""

import random
from collections.abc import Callable
from functools import partial
from itertools import chain

import pytest

from deployments.protocol.errors import SlipstreamError
from deployments.rollouts.rollout_ledger import NewTurn, Record, RolloutLedger, State
from tests.deployments.rollouts.turns import LIMITS, request

ROLLOUTS = ["a", "b", "c"]
LATER = {
    State.OPEN: {State.REWARDED, State.CONSUMED, State.DISCARDED},
    State.REWARDED: {State.CONSUMED, State.DISCARDED},
    State.CONSUMED: set[State](),
    State.DISCARDED: set[State](),
}


class Walk:
    def __init__(self, seed: int) -> None:
        self.drawn = random.Random(seed)
        self.now, self.steps, self.begun = 0.0, 0, 0
        self.ledger = RolloutLedger(LIMITS)
        self.disk: dict[tuple[str, str], Record] = {}
        self.lives: dict[str, int] = {}  # id -> which of its lives
        self.told: dict[str, set[str]] = {}  # step -> the lives that it learns from
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

    def go(self, calls: int) -> None:
        rules = [self.wait, self.restart, self.open, self.play, self.begin, self.settle, self.append]
        rules += [self.reward, self.discard, self.take]
        for _ in range(calls):
            self.drawn.choice(rules)()
            self.no_rollout_is_learned_from_twice()
            self.no_rollout_goes_back()
            self.every_number_of_a_run_is_open_or_ready_or_has_one_end()

    def name(self) -> str:
        return self.drawn.choice(ROLLOUTS)

    def undone(self) -> bool:
        return self.drawn.random() < 0.3

    # -- rules --------------------------------------------------------------------------------

    def wait(self) -> None:
        self.now += self.drawn.choice([1, 4, 4, 10, 10, 60])
        self.ledger.tick(self.now)
        self.save()

    def restart(self) -> None:
        before, self.ledger = self.seen(), RolloutLedger(LIMITS)
        for record in self.disk.values():
            self.ledger.load(record)
        assert self.seen() == before

    def open(self) -> None:
        self.begin_turn(self.name(), self.drawn.choice([None, None, "g", "r.0", "r.1"]))

    def begin_turn(self, name: str, group: str | None) -> None:
        if group is not None and group != "g" and int(group[-1]) >= self.begun:
            return  # it would be none of the run
        is_new, size = name not in self.states(), self.drawn.choice([0, 1, 2, 2, 3])
        asked = request(name, group=group, size=size if group is not None else 0)
        if self.call(lambda: self.ledger.open(asked, self.now), undone=self.undone()) and is_new:
            self.lives[name] = self.lives.get(name, 0) + 1

    def play(self) -> None:
        """Walks would else hardly come to what trainers do."""
        name = self.name()
        self.begin_turn(name, None)
        self.add_turn(name)
        self.call(lambda: self.ledger.reward(name, "", 1.0, self.now))

    def begin(self) -> None:
        begin = partial(self.ledger.begin, "r", self.begun, 1, self.now)
        self.begun += self.call(begin, undone=self.undone())

    def settle(self) -> None:
        """A job settles its group, and sends the call again."""
        rewards = dict.fromkeys(self.drawn.sample(ROLLOUTS, self.drawn.randrange(3)), 1.0)
        group = f"r.{self.drawn.randrange(4)}"
        settle = partial(self.ledger.settle, group, rewards, "left out", self.now)
        if self.call(settle, undone=self.undone()):
            before = self.seen()
            assert self.call(settle) and self.seen() == before

    def append(self) -> None:
        self.add_turn(self.name())

    def add_turn(self, name: str) -> None:
        turn = self.drawn.choice("xyz")
        new = NewTurn(
            request=turn, attempt=0, prompt=1, sampled=1, policy="", version=1, digest=lambda n: turn[:n]
        )
        self.call(lambda: self.ledger.append(name, "", new))

    def reward(self) -> None:
        name = self.name()
        self.call(lambda: self.ledger.reward(name, "", 1.0, self.now), undone=self.undone())

    def discard(self) -> None:
        name = self.name()
        self.call(lambda: self.ledger.discard(name, "", self.now))

    def take(self) -> None:
        """A new step, or one that was lost after it had asked, perhaps with another trainer's name."""
        run, count, back = self.drawn.choice(["", "r"]), self.drawn.choice([1, 1, 2]), self.drawn.randrange(3)
        self.steps += back == 0
        name, found = f"s{self.steps - back}", []
        _, _, ready = self.ledger.position(run, self.now)

        def ask() -> None:
            found.append(self.ledger.take(name, run, count, None, {}, self.now)[0])

        if not self.call(ask, undone=self.undone()):
            return
        if (taken := found[0]) is None:
            assert ready < count
            return
        told = [[each.key for each in self.ledger.rewarded(key)] for key in taken.groups]
        assert all(told), "a group without a reward"
        lives = {f"{each} {self.lives[each]}" for each in chain(*told)}
        if self.ledger.position(run, self.now)[2] < ready:  # it has consumed them now
            assert len(taken.groups) == count <= ready
            self.told[name] = lives
            self.learned += lives
        assert self.told[name] == lives, "the same step has the same answer"

    # -- invariants ---------------------------------------------------------------------------

    def no_rollout_is_learned_from_twice(self) -> None:
        assert len(self.learned) == len(set(self.learned))

    def no_rollout_goes_back(self) -> None:
        states = self.states()
        for name, state in states.items():
            before = self.before.get(name, state)
            assert state is before or state in LATER[before], name
        self.before = states

    def every_number_of_a_run_is_open_or_ready_or_has_one_end(self) -> None:
        run, opened, ready = self.ledger.position("r", self.now)
        assert run.next == self.begun == len(opened) + ready + sum(run.ends.values())


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, pytest.param(None, marks=pytest.mark.long)])
def test_whatever_is_called_each_rollout_is_learned_from_once(first: int | None) -> None:
    first = random.SystemRandom().randrange(10**9) if first is None else first
    for seed in range(first, first + (100 if first == 0 else 2000)):
        try:
            Walk(seed).go(calls=60)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
