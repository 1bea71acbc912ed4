"""Random walks over the ledger of rollouts, beside an oracle that knows every rollout's history.

Calls are undone and repeated, the ledger is loaded again from what was saved, trainers ask
again for their steps.
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
GROUPS = st.sampled_from([None, None, "g", "r.0", "r.1"])
RUNS = st.sampled_from(["", "r"])


@dataclass
class Known:
    """What the oracle knows of a rollout."""

    group: str
    state: State = State.OPEN
    turns: list[str] = field(default_factory=list)
    rewarded: bool = False

    def discard(self) -> None:
        """Its turns go with it."""
        self.state, self.turns = State.DISCARDED, []


@dataclass
class KnownGroup:
    """Of a group: times, of which its state follows."""

    size: int
    deadline: float
    run: str = ""
    closed_at: float = math.inf
    ended_at: float = math.inf
    step: str | None = None
    forget_at: float = math.inf
    members: list[str] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.closed_at < math.inf and self.ended_at == math.inf


class Oracle:
    """The rules again, by looking at everything whenever a second has passed."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Known] = {}
        self.groups: dict[str, KnownGroup] = {}
        self.steps: dict[str, float] = {}  # until
        self.begun = {"r": 0}
        self.newest = ""  # of the run's steps
        self.ends = {"": 0, "r": 0}

    def second(self, now: float) -> None:
        for name, group in list(self.groups.items()):
            if group.closed_at == math.inf and group.deadline <= now:
                self.close(group, now)
            if group.is_ready and not group.run and group.closed_at + LIMITS.keep_s <= now:
                for member in self.learned(group):
                    self.rollouts[member].discard()
                self.end(group, now)
            if group.forget_at <= now:
                del self.groups[name]
                for member in group.members:
                    del self.rollouts[member]
        self.steps = {step: until for step, until in self.steps.items() if until > now}

    def learned(self, group: KnownGroup) -> list[str]:
        return [each for each in group.members if self.rollouts[each].state is State.REWARDED]

    def settle(self, group: KnownGroup, now: float) -> None:
        states = [self.rollouts[each].state for each in group.members]
        if group.closed_at == math.inf and 0 < group.size <= sum(s is not State.OPEN for s in states):
            self.close(group, now)
        elif group.is_ready and not self.learned(group):
            self.end(group, now)

    def close(self, group: KnownGroup, now: float) -> None:
        group.closed_at = now
        for member in group.members:
            if self.rollouts[member].state is State.OPEN:
                self.rollouts[member].discard()
        if not self.learned(group):
            self.end(group, now)

    def end(self, group: KnownGroup, now: float) -> None:
        group.ended_at = now
        group.forget_at = math.inf if group.run and group.step else now + LIMITS.keep_s
        self.ends[group.run] += 1

    def took(self, step: str, run: str, now: float) -> None:
        """The run's former step is finished."""
        until = now + LIMITS.keep_s
        if run and self.newest in self.steps:
            self.steps[self.newest] = until
            for group in self.groups.values():
                if group.step == self.newest:
                    group.forget_at = until
        self.steps[step] = math.inf if run else until
        if run:
            self.newest = step

    def state(self, rollout: str) -> State:
        known = self.rollouts[rollout]
        is_consumed = self.groups[known.group].step is not None and known.state is State.REWARDED
        return State.CONSUMED if is_consumed else known.state


class Walk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.number = 0.0, 0
        self.ledger, self.oracle = RolloutLedger(LIMITS), Oracle()
        self.disk: dict[tuple[str, str], Record] = {}
        self.recorded: dict[str, set[str]] = {}  # step -> what it was told, by a recorder outside
        self.lives: dict[str, int] = {}  # id -> which of its lives

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
        if group is not None and group not in self.oracle.groups and group != "g":
            return  # it would be none of the run
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
        asked = request(name, group=group, size=size if group is not None else 0)
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
            oracle.groups.setdefault(
                key, KnownGroup(size=size, deadline=self.now + LIMITS.group_timeout_s)
            ).members.append(name)
            oracle.rollouts[name] = Known(group=key)
            self.lives[name] = self.lives.get(name, 0) + 1

    @rule(name=IDS, group=GROUPS)
    def play(self, name: str, group: str | None) -> None:
        """Walks would else hardly come to what trainers do."""
        self.open(name, group, 2, undone=False)
        self.append(name, "x")
        self.reward(name, undone=False)

    @rule(undone=st.booleans())
    def begin(self, undone: bool) -> None:
        number = self.oracle.begun["r"]
        self.ledger.begin("r", number, 1, self.now)
        if undone:
            self.ledger.undo()
            return
        self.save()
        self.oracle.begun["r"] += 1
        self.oracle.groups[f"r.{number}"] = KnownGroup(size=0, deadline=math.inf, run="r")

    @rule(number=st.integers(0, 3), data=st.data(), undone=st.booleans())
    def close(self, number: int, data: st.DataObject, undone: bool) -> None:
        """A job settles its group, and sends the call again."""
        group = self.oracle.groups.get(f"r.{number}")
        chosen = data.draw(st.sets(IDS, max_size=2)) if group is None or not group.members else None
        members = data.draw(st.sets(st.sampled_from(group.members))) if group and group.members else chosen
        rewards = dict.fromkeys(members or (), 1.0)
        before = group is not None and group.closed_at < math.inf
        try:
            self.ledger.settle(f"r.{number}", rewards, "left out", self.now)
        except SlipstreamError:
            self.ledger.undo()
            inside = [] if group is None else group.members
            found = [self.oracle.rollouts[each] if each in inside else None for each in rewards]
            wrong = any(each is None or each.state is not State.OPEN or not each.turns for each in found)
            assert group is None or before or wrong
            return
        assert group is not None
        if before:
            assert set(rewards) == {each for each in group.members if self.oracle.rollouts[each].rewarded}
            return
        if undone:
            self.ledger.undo()
            return
        self.save()
        for each in rewards:
            self.oracle.rollouts[each].state, self.oracle.rollouts[each].rewarded = State.REWARDED, True
        self.oracle.close(group, self.now)

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
            self.ledger.reward(name, "", 1.0, self.now)
        except SlipstreamError:
            self.ledger.undo()
            assert known is None or known.state is not State.OPEN or not known.turns
            return
        assert known is not None and (known.rewarded or (known.state is State.OPEN and known.turns))
        if undone:
            self.ledger.undo()
            return
        self.save()
        if known.rewarded:  # the call is repeated
            return
        known.state, known.rewarded = State.REWARDED, True
        self.oracle.settle(self.oracle.groups[known.group], self.now)

    @rule(name=IDS)
    def discard(self, name: str) -> None:
        known = self.oracle.rollouts.get(name)
        try:
            self.ledger.discard(name, "", self.now)
        except SlipstreamError:
            self.ledger.undo()
            assert known is None or self.oracle.groups[known.group].step is not None
            return
        assert known is not None
        self.save()
        known.discard()
        self.oracle.settle(self.oracle.groups[known.group], self.now)

    @rule(run=RUNS, count=st.integers(1, 2), back=st.integers(0, 2), undone=st.booleans())
    def take(self, run: str, count: int, back: int, undone: bool) -> None:
        """A new step, or one that was lost after it had asked, perhaps with another trainer's name."""
        self.number += back == 0
        step = f"s{self.number - back}"
        is_known = step in self.oracle.steps
        try:
            taken, stale = self.ledger.take(step, run, count, None, "", {}, self.now)
        except SlipstreamError:
            self.ledger.undo()
            assert is_known
            return
        if undone:
            self.ledger.undo()
            return
        self.save()
        groups = self.oracle.groups
        ready = [key for key, group in groups.items() if group.is_ready and group.run == run]
        assert stale == 0 and (is_known or (taken is None) == (len(ready) < count))
        if taken is None:
            return
        told = [each.key for key in taken.groups for each in self.ledger.rewarded(key)]
        lives = {f"{each} {self.lives[each]}" for each in told}
        if is_known:
            assert self.recorded[step] == lives, "the same call has the same answer"
            return
        assert set(taken.groups) <= set(ready) and len(taken.groups) == count
        self.recorded[f"{step} at {self.now}"] = self.recorded[step] = lives
        for key in taken.groups:
            groups[key].step = step
            self.oracle.end(groups[key], self.now)
        self.oracle.took(step, run, self.now)

    @invariant()
    def no_rollout_is_learned_from_twice(self) -> None:
        told = [each for step, lives in self.recorded.items() if " at " in step for each in lives]
        assert len(told) == len(set(told))

    @invariant()
    def it_agrees_with_the_oracle(self) -> None:
        states, _ = self.ledger.counts(self.now)
        assert sum(states.values()) == len(self.oracle.rollouts)
        for name in self.oracle.rollouts:
            assert self.ledger.state(name) is self.oracle.state(name), name

    @invariant()
    def every_number_of_a_run_is_open_or_ready_or_has_one_end(self) -> None:
        run, opened, ready = self.ledger.position("r", self.now)
        ended = sum(run.ends.values())
        assert (run.next, ended) == (self.oracle.begun["r"], self.oracle.ends["r"])
        assert run.next == len(opened) + ready + ended


SEARCH = not settings().derandomize  # in `make test-all`; else a few, which are always the same
TestWalk = pytest.mark.slow(Walk.TestCase)
TestWalk.settings = settings(
    max_examples=settings().max_examples if SEARCH else 60, stateful_step_count=50, deadline=None
)
