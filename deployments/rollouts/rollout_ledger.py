"""The pure state machine of rollouts.

    turn ──► OPEN ──reward──► REWARDED ──take──► CONSUMED
              │                  │ too stale, or nobody takes it for `keep_s`
              └─discard, or its group's deadline──► DISCARDED

A rollout without a group is a group of one. A group is closed by `settle`, when `size` members are rewarded
or discarded, or at its deadline. A step takes whole closed groups, and gets the same ones again by its name.
A run is a job that numbers its groups: all before its `next` have ended, are ready, or are open. What it has
not finished, its newest step included, is kept for `RUN_KEPT_S` without it.

Records are frozen: the store writes changed ones in one transaction, or undoes them. Times are seconds since
1970: records outlive a process.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any, ClassVar

from deployments.protocol.errors import (
    Conflict,
    FleetUnavailable,
    InvalidRequest,
    NotFound,
    OverQuota,
    PayloadTooLarge,
)
from deployments.protocol.rollouts import Reward, RolloutLimits, RolloutRequest

RUN_KEPT_S = 30 * 86400.0
MAX_TOKENS = 1 << 20  # per rollout, with forks; an answer of `/rollouts/take` has about as many
USER_SHARE = 1 / 4  # one user's part of `max_rollouts` and `max_gib`
ALONE = "~"  # prefix for the group of a rollout without one; no id has it
TOKEN_BYTES, TURN_BYTES = 40, 2048  # most on disk: per-token rewards, ids of 128 letters


class State(StrEnum):
    OPEN = "open"
    REWARDED = "rewarded"  # group: closed, ready to be learned from
    CONSUMED = "consumed"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Its group's state says whether it is consumed."""

    KIND: ClassVar[str] = "rollout"
    key: str
    owner: str
    group: str
    state: State = State.OPEN
    turns: int = 0
    tokens: int = 0  # stored: prefixes shared between turns count once
    routed_bytes: int = 0  # per token
    reward: Reward | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer; its tokens are in the store."""

    KIND: ClassVar[str] = "turn"
    key: str  # ROLLOUT/NUMBER
    request: str
    attempt: int
    parent: int  # turn whose prompt and answer begin this prompt; -1: none
    length: int  # prompt and answer
    digest: str  # prompt and answer
    stored: int  # not in the parent
    sampled: int
    policy: str  # the adapter's name; "": the base model
    version: int  # oldest version of the policy behind its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    KIND: ClassVar[str] = "group"
    key: str
    owner: str
    size: int  # 0: only `settle` or the deadline closes it
    members: tuple[str, ...]
    due: float | None  # when the next step happens by itself
    state: State = State.OPEN
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The groups of one job; "": those without one."""

    KIND: ClassVar[str] = "run"
    key: str
    next: int = 0  # all earlier numbers were begun
    step: str = ""  # the newest one
    ends: Mapping[str, int] = field(default_factory=dict)  # reason -> groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a trainer's step has consumed."""

    KIND: ClassVar[str] = "step"
    key: str
    run: str
    groups: tuple[str, ...]
    due: float | None


Record = Rollout | Turn | Group | Run | Step
KINDS: Mapping[str, type[Record]] = {each.KIND: each for each in (Rollout, Turn, Group, Run, Step)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTurn:
    """`digest` covers the first so many tokens."""

    request: str
    attempt: int
    prompt: int
    sampled: int
    policy: str
    version: int
    routed_bytes: int = 0
    digest: Callable[[int], str]


class RolloutLedger:
    """All rollouts. Changing methods may raise SlipstreamError half-way: the caller undoes their changes."""

    def __init__(self, limits: RolloutLimits) -> None:
        self._limits = limits
        self._rollouts: dict[str, Rollout] = {}
        self._turns: dict[str, Turn] = {}
        self._groups: dict[str, Group] = {}
        self._runs: dict[str, Run] = {}
        self._steps: dict[str, Step] = {}
        self._tables: Mapping[str, dict[str, Any]] = {
            "rollout": self._rollouts,
            "turn": self._turns,
            "group": self._groups,
            "run": self._runs,
            "step": self._steps,
        }
        # Oldest first. Discarded groups are forgotten before others.
        self._ended: dict[State, dict[str, None]] = {State.DISCARDED: {}, State.CONSUMED: {}}
        self._waiting, self._bytes = Counter[str](), Counter[str]()  # open or ready rollouts, by owner
        self._due: list[tuple[float, str, str]] = []  # a heap with outdated entries
        self._before: dict[tuple[str, str], Record | None] = {}  # records as they were, of unsaved changes

    def load(self, record: Record) -> None:
        self._set(record.KIND, record.key, record)

    def changes(self) -> dict[tuple[str, str], Record | None]:
        """Records by kind and key since `saved` or `undo`; None: removed."""
        return {(kind, key): self._tables[kind].get(key) for kind, key in self._before}

    def saved(self) -> None:
        self._before.clear()

    def undo(self) -> None:
        for (kind, key), record in self._before.items():
            self._set(kind, key, record)
        self._before.clear()

    def _put(self, record: Record) -> None:
        self._note(record.KIND, record.key)
        self._set(record.KIND, record.key, record)

    def _drop(self, kind: str, key: str) -> None:
        self._note(kind, key)
        self._set(kind, key, None)

    def _note(self, kind: str, key: str) -> None:
        self._before.setdefault((kind, key), self._tables[kind].get(key))

    def _set(self, kind: str, key: str, record: Record | None) -> None:
        table = self._tables[kind]
        former = table.get(key)
        for each, sign in ((former, -1), (record, 1)):
            if isinstance(each, Rollout):
                size = TURN_BYTES * (1 + each.turns) + (TOKEN_BYTES + each.routed_bytes) * each.tokens
                self._bytes[each.owner] += sign * size
            elif isinstance(each, Group) and each.state not in self._ended:
                self._waiting[each.owner] += sign * len(each.members)
        if isinstance(former, Group) and former.state in self._ended:
            del self._ended[former.state][key]
        if record is None:
            table.pop(key, None)
            return
        table[key] = record
        if isinstance(record, Group) and record.state in self._ended:
            self._ended[record.state][key] = None
        due = getattr(record, "due", None)
        if due is not None and due != getattr(former, "due", None):
            heappush(self._due, (due, kind, key))

    def open(self, request: RolloutRequest, now: float) -> None:
        """Begin a turn; the first one creates its rollouts. Raises Conflict: a rollout takes no more turns,
        or belongs, with its group, to another user; OverQuota: the user's share is used; FleetUnavailable:
        too many rollouts are kept."""
        self.tick(now)
        for key in request.rollout_ids:
            self._open(key, request, now)

    def _open(self, key: str, request: RolloutRequest, now: float) -> None:
        if key in self._rollouts:
            rollout = self._of(key, request.owner)
            wanted = request.group or ALONE + key
            if request.group is not None and rollout.group != wanted:
                raise Conflict(f"rollout {key!r} is of the group {rollout.group!r}, not {request.group!r}")
            self._require_open(rollout)
            self._check_share(request.owner, 0)
            return
        self._check_share(request.owner, 1)
        while len(self._rollouts) >= self._limits.max_rollouts:
            if not any(self._ended.values()):
                if (idle := self._idle(now)) is None:
                    break
                self._end(idle, State.DISCARDED, "expired", now)
            self._forget(next(key for keys in self._ended.values() for key in keys))
        if len(self._rollouts) >= self._limits.max_rollouts:
            raise FleetUnavailable(
                f"{len(self._rollouts)} rollouts are kept, the most that 'rollouts.max_rollouts' allows: "
                "take or discard some"
            )
        group = self._join(key, request, now)
        self._put(replace(group, members=(*group.members, key)))
        self._put(Rollout(key=key, owner=request.owner, group=group.key))

    def _check_share(self, owner: str, more: int) -> None:
        if not owner:
            return
        limits, waiting, stored = self._limits, self._waiting[owner] + more, self._bytes[owner]
        most = math.ceil(USER_SHARE * limits.max_rollouts)
        most_bytes = int(USER_SHARE * limits.max_gib * 2**30)
        if waiting > most or stored > most_bytes:
            raise OverQuota(
                f"one user's rollouts: expected at most {most} that are open or wait for a trainer, and "
                f"{most_bytes} bytes, got {waiting} and {stored}: discard some, "
                "or wait until a trainer has taken them"
            )

    def _join(self, key: str, request: RolloutRequest, now: float) -> Group:
        name = request.group or ALONE + key
        group = self._groups.get(name)
        if group is None:
            due = now + self._limits.keep_s
            size = 1 if request.group is None else request.group_size
            return Group(key=name, owner=request.owner, size=size, members=(), due=due)
        if request.owner and request.owner != group.owner:
            raise Conflict(f"group {name!r} was begun with another token")
        if group.state is not State.OPEN:
            raise Conflict(f"group {name!r} is closed: expected another group")
        if request.group_size and request.group_size != group.size:
            raise Conflict(f"group {name!r} was begun with size {group.size}, got {request.group_size}")
        if group.size and len(group.members) >= group.size:
            raise Conflict(f"group {name!r} has all of its {group.size} rollouts")
        return group

    def append(self, rollout_id: str, owner: str, new: NewTurn) -> tuple[int, Turn] | None:
        """Add a finished turn; returns its number and record, or None if it exists. A later attempt replaces
        an earlier one.

        Raises:
            NotFound, Conflict: as `open`; or another answer to the request is kept, which this one does not
                replace: its client must not get this one.
            PayloadTooLarge: the rollout would have more than `MAX_TOKENS`.
        """
        rollout = self._of(rollout_id, owner)
        turns = self._turns_of(rollout)
        number = next((n for n, turn in enumerate(turns) if turn.request == new.request), rollout.turns)
        former = turns[number] if number < rollout.turns else None
        if former is not None and new.attempt == former.attempt:
            return None
        self._require_open(rollout)
        went_on = any(turn.parent == number for turn in turns)
        if former is not None and (new.attempt < former.attempt or went_on):
            reason = "has a next turn" if went_on else "began later, by the clocks of the fleet's hosts"
            raise Conflict(
                f"turn {new.request!r} of rollout {rollout_id!r} has another answer than this: the kept one "
                f"{reason}"
            )
        parent, prefix = -1, 0
        for each, turn in enumerate(turns):
            if (
                each != number
                and prefix < turn.length <= new.prompt
                and turn.digest == new.digest(turn.length)
            ):
                parent, prefix = each, turn.length
        length = new.prompt + new.sampled
        added = Turn(
            key=f"{rollout_id}/{number}",
            request=new.request,
            attempt=new.attempt,
            parent=parent,
            length=length,
            digest=new.digest(length),
            stored=length - prefix,
            sampled=new.sampled,
            policy=new.policy,
            version=new.version,
        )
        tokens = rollout.tokens + added.stored - (0 if former is None else former.stored)
        if tokens > MAX_TOKENS:
            raise PayloadTooLarge(
                f"rollout {rollout_id!r}: expected at most {MAX_TOKENS} tokens, got {tokens}"
            )
        self._put(added)
        turns_now, routed = max(rollout.turns, number + 1), max(rollout.routed_bytes, new.routed_bytes)
        self._put(replace(rollout, turns=turns_now, tokens=tokens, routed_bytes=routed))
        return number, added

    def reward(self, rollout_id: str, owner: str, reward: Reward, now: float) -> None:
        """One number, one for each turn, or one for each sampled token of each turn. Idempotent.

        Raises:
            NotFound: unknown.
            Conflict: it has a reward or no turn, is closed, consumed or discarded, or another user's.
            InvalidRequest: not finite, or not as many as turns or tokens.
        """
        self.tick(now)
        rollout = self._of(rollout_id, owner)
        if reward != rollout.reward:
            self._reward(rollout, reward)
        self._close_if_complete(rollout.group, now)

    def discard(self, rollout_id: str, owner: str, now: float) -> None:
        """No step will learn from it. Idempotent. Raises NotFound, or Conflict: it is consumed."""
        self.tick(now)
        rollout = self._of(rollout_id, owner)
        group = self._groups[rollout.group]
        if rollout.state is State.DISCARDED:
            return
        if group.state is State.CONSUMED:
            raise Conflict(f"rollout {rollout_id!r} is consumed, and cannot be discarded")
        self._discard(rollout)
        if group.state is State.REWARDED and not self.rewarded(group.key):
            self._end(group, State.DISCARDED, "discarded", now)
        self._close_if_complete(group.key, now)

    def begin(self, run: str, number: int, count: int, now: float) -> None:
        """Open `count` groups from RUN.NUMBER on. Idempotent, also for earlier numbers. Raises Conflict: an
        agent has begun a group with one of these names."""
        self.tick(now)
        known = self._run(run)
        for new in range(max(number, known.next), number + count):
            key = f"{run}.{new}"
            if key in self._groups:
                raise Conflict(f"group {key!r} was begun by a request: expected another name of the run")
            self._put(Group(key=key, owner="", size=0, members=(), due=now + RUN_KEPT_S, run=run))
            self._put(replace(known, next=new + 1))

    def settle(self, group_id: str, rewards: Mapping[str, Reward], reason: str, now: float) -> None:
        """Reward these members of a group, discard the others, and close it. Idempotent.

        Args:
            reason: why it is left out, if there is no reward.

        Raises:
            NotFound: the group, or a member of this name, is unknown.
            Conflict: it was closed with other members, or one has a reward or no turn.
            InvalidRequest: as `reward`.
        """
        self.tick(now)
        group = self._groups.get(group_id)
        if group is None:
            raise NotFound(f"group {group_id!r} is unknown; 'rollouts.keep_s' is how long they are kept")
        if group.state is not State.OPEN:
            # Also for one that became too stale since.
            if {each.key for each in self._members(group) if each.reward is not None} != set(rewards):
                raise Conflict(f"group {group_id!r} is {group.state}, with other members")
            return
        for key, reward in rewards.items():
            if key not in group.members:
                raise NotFound(f"group {group_id!r} has no rollout {key!r}")
            self._reward(self._rollouts[key], reward)
        for rollout in self._members(group):
            if rollout.key not in rewards and rollout.reward is not None:  # an agent's
                self._discard(replace(rollout, reward=None))
        self._close(group, reason, now)

    def position(self, run: str, now: float) -> tuple[Run, list[str], int]:
        """A run, its open groups, and the number of ready ones."""
        self.tick(now)
        groups = [group for group in self._groups.values() if group.run == run]
        opened = [group.key for group in groups if group.state is State.OPEN]
        return self._run(run), opened, sum(group.state is State.REWARDED for group in groups)

    def take(
        self,
        step: str,
        run: str,
        count: int,
        max_staleness: int | None,
        current: Mapping[str, int],
        now: float,
    ) -> tuple[Step | None, int]:
        """Consume the run's `count` oldest closed groups, or none while there are fewer; the same step gets
        the same groups again. The second result: groups discarded as too stale.

        Args:
            max_staleness: versions between the oldest token and the policy's current one; None: any.
            current: versions by policy; groups of other policies are stale.

        Raises:
            Conflict: the step is another run's, or what it consumed is no longer kept.
        """
        self.tick(now)
        known = self._steps.get(step)
        if known is not None:
            if known.run != run:
                raise Conflict(f"step {step!r} is of the run {known.run!r}, got {run!r}")
            if any(key not in self._groups for key in known.groups):
                raise Conflict(f"step {step!r} has consumed its groups, and they are no longer kept")
            return known, 0
        ready = [each for each in self._groups.values() if each.run == run and each.state is State.REWARDED]
        stale = [] if max_staleness is None else self._staler(ready, max_staleness, current)
        for group in stale:
            self._end(group, State.DISCARDED, "stale", now)
        chosen = [group for group in ready if group not in stale][:count]
        if len(chosen) < count:
            return None, len(stale)
        for group in chosen:
            self._end(group, State.CONSUMED, "consumed", now)
        self._finish_step(run, now)
        names, due = tuple(each.key for each in chosen), now + self._kept_s(run)
        taken = Step(key=step, run=run, groups=names, due=due)
        self._put(taken)
        if run:
            self._put(replace(self._run(run), step=step))
        return taken, len(stale)

    def rewarded(self, group: str) -> list[Rollout]:
        return [each for each in self._members(self._groups[group]) if each.state is State.REWARDED]

    def state(self, rollout_id: str) -> State:
        """Raises NotFound."""
        rollout = self._of(rollout_id, "")
        is_consumed = self._groups[rollout.group].state is State.CONSUMED
        return State.CONSUMED if is_consumed and rollout.state is State.REWARDED else rollout.state

    def counts(self, now: float) -> tuple[dict[str, int], dict[str, int]]:
        """Kept rollouts by state, and ended groups by reason."""
        self.tick(now)
        states = dict.fromkeys(State, 0)
        for key in self._rollouts:
            states[self.state(key)] += 1
        ends = sum((Counter(run.ends) for run in self._runs.values()), Counter[str]())
        return {str(state): count for state, count in states.items()}, dict(ends)

    def tick(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            due, kind, key = heappop(self._due)
            record = self._tables[kind].get(key)
            if record is None or record.due != due:
                continue
            if kind == Step.KIND:
                self._drop(kind, key)
            elif record.state is State.OPEN:
                self._close(record, "unrewarded", due)
            elif record.state is State.REWARDED:
                self._end(record, State.DISCARDED, "expired", due)
            else:
                self._forget(key)

    def _close_if_complete(self, key: str, now: float) -> None:
        group = self._groups[key]
        settled = sum(self._rollouts[each].state is not State.OPEN for each in group.members)
        if group.state is State.OPEN and 0 < group.size <= settled:
            self._close(group, "discarded", now)

    def _close(self, group: Group, reason: str, now: float) -> None:
        """Discards members without a reward, and a group without any."""
        for rollout in self._members(group):
            if rollout.state is State.OPEN:
                self._discard(rollout)
        if self.rewarded(group.key):
            self._put(replace(group, state=State.REWARDED, due=now + self._kept_s(group.run)))
        else:
            self._end(group, State.DISCARDED, reason, now)

    def _end(self, group: Group, state: State, reason: str, now: float) -> None:
        if state is State.DISCARDED:
            for rollout in self.rewarded(group.key):
                self._discard(rollout)
        kept_s = self._limits.keep_s if state is State.DISCARDED else self._kept_s(group.run)
        self._put(replace(group, state=state, due=now + kept_s))
        run = self._run(group.run)
        self._put(replace(run, ends={**run.ends, reason: run.ends.get(reason, 0) + 1}))

    def _finish_step(self, run: str, now: float) -> None:
        former, due = self._steps.get(self._run(run).step), now + self._limits.keep_s
        if former is not None:
            self._put(replace(former, due=due))
            for key in former.groups:
                if (group := self._groups.get(key)) is not None:
                    self._put(replace(group, due=due))

    def _discard(self, rollout: Rollout) -> None:
        """Its tokens go at once. Its number stays, so that repeating its reward is harmless."""
        self._drop_turns(rollout)
        reward = 0.0 if isinstance(rollout.reward, tuple) else rollout.reward
        self._put(replace(rollout, state=State.DISCARDED, turns=0, tokens=0, reward=reward))

    def _drop_turns(self, rollout: Rollout) -> None:
        for turn in self._turns_of(rollout):
            self._drop(Turn.KIND, turn.key)

    def _forget(self, group: str) -> None:
        for rollout in self._members(self._groups[group]):
            self._drop_turns(rollout)
            self._drop(Rollout.KIND, rollout.key)
        self._drop(Group.KIND, group)

    def _of(self, rollout_id: str, owner: str) -> Rollout:
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            raise NotFound(f"rollout {rollout_id!r} is unknown; 'rollouts.keep_s' is how long they are kept")
        if owner and owner != rollout.owner:
            raise Conflict(f"rollout {rollout_id!r} was begun with another token")
        return rollout

    def _require_open(self, rollout: Rollout) -> None:
        if rollout.state is not State.OPEN:
            raise Conflict(f"rollout {rollout.key!r} is {self.state(rollout.key)}: expected an open one")

    def _run(self, run: str) -> Run:
        return self._runs.get(run) or Run(key=run)

    def _idle(self, now: float) -> Group | None:
        """A group that has waited longest for its run's job, for more than `keep_s`."""
        for group in self._groups.values():
            due = math.inf if group.due is None else group.due
            if group.run and now + self._kept_s(group.run) - due > self._limits.keep_s:
                return group
        return None

    def _kept_s(self, run: str) -> float:
        return max(RUN_KEPT_S, self._limits.keep_s) if run else self._limits.keep_s

    def _members(self, group: Group) -> list[Rollout]:
        return [self._rollouts[key] for key in group.members]

    def _reward(self, rollout: Rollout, reward: Reward) -> None:
        self._require_open(rollout)
        if not rollout.turns:
            raise Conflict(f"rollout {rollout.key!r} has no turn to reward")
        _check_reward(reward, [turn.sampled for turn in self._turns_of(rollout)])
        self._put(replace(rollout, state=State.REWARDED, reward=reward))

    def _turns_of(self, rollout: Rollout) -> list[Turn]:
        return [self._turns[f"{rollout.key}/{number}"] for number in range(rollout.turns)]

    def _staler(self, groups: Sequence[Group], max_staleness: int, current: Mapping[str, int]) -> list[Group]:
        """Includes groups of a removed adapter, even if another has its name and lower versions."""

        def staleness(group: Group) -> float:
            turns = (turn for rollout in self.rewarded(group.key) for turn in self._turns_of(rollout))
            behind = [current.get(turn.policy, math.inf) - turn.version for turn in turns]
            return math.inf if min(behind) < 0 else max(behind)

        return [group for group in groups if staleness(group) > max_staleness]


def _check_reward(reward: Reward, sampled: list[int]) -> None:
    per_turn = reward if isinstance(reward, tuple) else (reward,)
    if isinstance(reward, tuple) and len(reward) != len(sampled):
        raise InvalidRequest(f"reward: expected one for each of {len(sampled)} turns, got {len(reward)}")
    for turn, (value, tokens) in enumerate(zip(per_turn, sampled, strict=False)):
        if isinstance(value, tuple) and len(value) != tokens:
            raise InvalidRequest(
                f"reward: expected one for each of the {tokens} tokens of turn {turn}, got {len(value)}"
            )
        if wrong := [x for x in (value if isinstance(value, tuple) else (value,)) if not math.isfinite(x)]:
            raise InvalidRequest(f"reward: expected finite numbers, got {wrong[0]}")
