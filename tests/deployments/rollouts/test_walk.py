"""Random walks over the ledger of rollouts, beside an oracle that knows every rollout's history.

Calls are undone and repeated, the ledger is loaded again from what was saved, trainers die with their leases.
"""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.protocol.errors import SlipstreamError
from deployments.rollouts.rollout_ledger import NewTurn, Record, RolloutLedger, State
from tests.deployments.rollouts.turns import LIMITS, request

IDS = st.sampled_from(["a", "b", "c"])
GROUPS = st.sampled_from([None, None, "g"])


@dataclass
class Known:
    """What the oracle knows of a rollout: times, of which the state follows."""

    group: str
    state: State = State.OPEN
    turns: list[str] = field(default_factory=list)


@dataclass
class KnownGroup:
    """Of a group."""

    size: int
    deadline: float
    closed_at: float = math.inf
    ended_at: float = math.inf
    lease: str | None = None
    members: list[str] = field(default_factory=list)


class Oracle:
    """The rules again, by looking at everything whenever a second has passed."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Known] = {}
        self.groups: dict[str, KnownGroup] = {}
        self.leases: dict[str, float] = {}  # until
        self.steps: dict[str, str] = {}

    def second(self, now: float) -> None:
        for lease, until in list(self.leases.items()):
            if lease not in self.steps.values() and until <= now:
                del self.leases[lease]
                for group in self.groups.values():
                    if group.lease == lease:
                        group.lease, group.closed_at = None, now
        for name, group in list(self.groups.items()):
            if group.closed_at == math.inf and group.deadline <= now:
                self.close(group, now)
            if group.lease is None and group.ended_at == math.inf and group.closed_at + LIMITS.keep_s <= now:
                for member in self.learned(group):
                    self.rollouts[member].state = State.DISCARDED
                group.ended_at = now
            if group.ended_at + LIMITS.keep_s <= now:
                del self.groups[name]
                for member in group.members:
                    del self.rollouts[member]
        for step, lease in list(self.steps.items()):
            if self.leases[lease] <= now:
                del self.steps[step], self.leases[lease]

    def learned(self, group: KnownGroup) -> list[str]:
        return [each for each in group.members if self.rollouts[each].state is State.REWARDED]

    def settle(self, group: KnownGroup, now: float) -> None:
        states = [self.rollouts[each].state for each in group.members]
        if group.closed_at == math.inf and 0 < group.size <= sum(s is not State.OPEN for s in states):
            self.close(group, now)
        elif group.closed_at < math.inf and group.ended_at == math.inf and not self.learned(group):
            group.ended_at = now

    def close(self, group: KnownGroup, now: float) -> None:
        group.closed_at = now
        for member in group.members:
            if self.rollouts[member].state is State.OPEN:
                self.rollouts[member].state = State.CLOSED
        if not self.learned(group):
            group.ended_at = now

    def state(self, rollout: str) -> State:
        known = self.rollouts[rollout]
        group = self.groups[known.group]
        if known.state is State.REWARDED and group.lease is not None:
            return State.CONSUMED if group.lease in self.steps.values() else State.LEASED
        return known.state


class Walk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.number = 0.0, 0
        self.ledger, self.oracle = RolloutLedger(LIMITS), Oracle()
        self.disk: dict[tuple[str, str], Record] = {}
        self.recorded: dict[str, set[str]] = {}  # lease -> what its step was told, by a recorder outside
        self.begun: dict[str, int] = {}  # id -> which of its lives

    def save(self) -> None:
        for place, record in self.ledger.changes().items():
            self.disk.pop(place, None) if record is None else self.disk.__setitem__(place, record)
        self.ledger.saved()

    @rule(seconds=st.sampled_from([1, 4, 4, 10, 10, 60]))
    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.oracle.second(self.now)
        self.ledger.tick(self.now)
        self.save()

    @rule()
    def restart(self) -> None:
        self.ledger = RolloutLedger(LIMITS)
        for record in self.disk.values():
            self.ledger.load(record)

    @rule(name=IDS, group=GROUPS, size=st.integers(0, 3), undone=st.booleans())
    def open(self, name: str, group: str | None, size: int, undone: bool) -> None:
        oracle, key = self.oracle, group or f"~{name}"
        known, at = oracle.rollouts.get(name), oracle.groups.get(key)
        size = size if group is not None else 1
        if known is not None:
            refused = known.state is not State.OPEN or (group is not None and known.group != key)
        elif at is not None:
            wrong = bool(group is not None and size and size != at.size)
            refused = at.closed_at < math.inf or wrong or (0 < at.size <= len(at.members))
        else:
            refused = False
        asked = request(name, group=group, size=size if group is not None else 0, timeout_s=30)
        try:
            self.ledger.open(asked, self.now)
        except SlipstreamError:
            self.ledger.undo()
            assert refused
            return
        assert not refused
        if undone:
            self.ledger.undo()
            return
        self.save()
        if known is None:
            oracle.groups.setdefault(key, KnownGroup(size=size, deadline=self.now + 30)).members.append(name)
            oracle.rollouts[name] = Known(group=key)
            self.begun[name] = self.begun.get(name, 0) + 1

    @rule(name=IDS, group=GROUPS)
    def play(self, name: str, group: str | None) -> None:
        """Walks would else hardly come to what trainers do."""
        self.open(name, group, 2, undone=False)
        self.append(name, "x")
        self.reward(name, undone=False)

    @rule(most=st.integers(1, 2), step=st.integers(0, 1))
    def learn(self, most: int, step: int) -> None:
        self.lease(most, undone=False)
        self.consume(0, step, undone=False)

    @rule(name=IDS, turn=st.sampled_from("xyz"))
    def append(self, name: str, turn: str) -> None:
        known = self.oracle.rollouts.get(name)
        new = NewTurn(
            request=turn, attempt=0, prompt=1, sampled=1, policy="", version=1, digest=lambda n: turn[:n]
        )
        try:
            added = self.ledger.append(name, "", new)
        except SlipstreamError:
            self.ledger.undo()
            assert known is None or (known.state is not State.OPEN and turn not in known.turns)
            return
        assert known is not None and (added is None) == (turn in known.turns)
        self.save()
        if added is not None:
            known.turns.append(turn)

    @rule(name=IDS, undone=st.booleans())
    def reward(self, name: str, undone: bool) -> None:
        known = self.oracle.rollouts.get(name)
        try:
            self.ledger.reward(name, "", 1.0, None, self.now)
        except SlipstreamError:
            self.ledger.undo()
            assert known is None or known.state is not State.OPEN or not known.turns
            return
        assert known is not None and known.state is State.OPEN and known.turns
        if undone:
            self.ledger.undo()
            return
        self.save()
        known.state = State.REWARDED
        self.oracle.settle(self.oracle.groups[known.group], self.now)

    @rule(name=IDS)
    def discard(self, name: str) -> None:
        known = self.oracle.rollouts.get(name)
        try:
            self.ledger.discard(name, "", self.now)
        except SlipstreamError:
            self.ledger.undo()
            assert known is None or self.oracle.groups[known.group].lease is not None
            return
        assert known is not None
        self.save()
        known.state = State.DISCARDED
        self.oracle.settle(self.oracle.groups[known.group], self.now)

    @rule(most=st.integers(1, 3), undone=st.booleans())
    def lease(self, most: int, undone: bool) -> None:
        self.number += 1
        lease, _ = self.ledger.lease(f"l{self.number}", most, None, {}, self.now)
        if undone:
            self.ledger.undo()
            return
        self.save()
        ready = [
            key
            for key, group in self.oracle.groups.items()
            if group.closed_at < math.inf and group.ended_at == math.inf and group.lease is None
        ]
        taken = [] if lease is None else list(lease.groups)
        assert set(taken) <= set(ready) and len(taken) == min(most, len(ready))
        for key in taken:
            self.oracle.groups[key].lease = f"l{self.number}"
        if lease is not None:
            self.oracle.leases[lease.key] = self.now + LIMITS.lease_s

    @rule(back=st.integers(0, 1), step=st.integers(0, 1), undone=st.booleans())
    def consume(self, back: int, step: int, undone: bool) -> None:
        lease, name = f"l{self.number - back}", f"step {step}"
        steps = self.oracle.steps
        mine = next((each for each, of in steps.items() if of == lease), None)
        refused = (
            lease not in self.oracle.leases or (mine not in (None, name)) or steps.get(name, lease) != lease
        )
        try:
            told = self.ledger.consume(lease, name, self.now)
        except SlipstreamError:
            self.ledger.undo()
            assert refused
            return
        assert not refused
        if undone:
            self.ledger.undo()
            return
        self.save()
        lives = {f"{each} {self.begun[each]}" for each in told}
        assert self.recorded.setdefault(lease, lives) == lives, "the same call has the same answer"
        if mine is None:
            steps[name] = lease
            self.oracle.leases[lease] = self.now + LIMITS.keep_s
            for group in self.oracle.groups.values():
                if group.lease == lease:
                    group.ended_at = self.now

    @invariant()
    def no_rollout_is_learned_from_twice(self) -> None:
        told = [each for lives in self.recorded.values() for each in lives]
        assert len(told) == len(set(told))

    @invariant()
    def it_agrees_with_the_oracle(self) -> None:
        states, _ = self.ledger.counts(self.now)
        assert sum(states.values()) == len(self.oracle.rollouts)
        for name in self.oracle.rollouts:
            assert self.ledger.state(name) is self.oracle.state(name), name


SEARCH = not settings().derandomize  # in `make test-all`; else a few, which are always the same
TestWalk = pytest.mark.slow(Walk.TestCase)
TestWalk.settings = settings(
    max_examples=settings().max_examples if SEARCH else 60, stateful_step_count=50, deadline=None
)
