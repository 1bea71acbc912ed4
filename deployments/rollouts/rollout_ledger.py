"""The pure state machine of rollouts: which are open, rewarded, lent to a trainer, consumed.

    turn ──► OPEN ──reward──► REWARDED ──lease──► LEASED ──consume──► CONSUMED
              │ group's deadline     ▲── the lease expires ──┘
              ├──────────► CLOSED
              └─discard──► DISCARDED ◄──discard, or nobody leases it for `keep_s`── REWARDED

A rollout without a group is a group of one. A group closes when `size` members are rewarded or discarded, or
at its deadline; only closed groups are leased, and whole. Records are frozen: the store writes the changed
ones in one transaction, or undoes them. Times are seconds since 1970, because records outlive a process.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any, ClassVar

from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, NotFound, PayloadTooLarge
from deployments.protocol.rollouts import Reward, RolloutLimits, RolloutRequest

MAX_LEASED = 1 << 22  # tokens: some 100 MB of JSON
ALONE = "~"  # begins the group of a rollout without one; no id has it


class State(StrEnum):
    OPEN = "open"
    CLOSED = "closed"  # its group's deadline passed without a reward
    REWARDED = "rewarded"
    LEASED = "leased"
    CONSUMED = "consumed"
    DISCARDED = "discarded"


ENDED = (State.CONSUMED, State.DISCARDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A trajectory. Whether it is leased or consumed is its group's state."""

    KIND: ClassVar[str] = "rollout"
    key: str
    owner: str
    group: str
    state: State = State.OPEN
    turns: int = 0
    tokens: int = 0  # stored ones: prefixes shared between turns count once
    reward: Reward | None = None
    reward_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer; its tokens are in the store."""

    KIND: ClassVar[str] = "turn"
    key: str  # ROLLOUT/NUMBER
    request: str
    attempt: int
    parent: int  # the turn whose prompt and answer begin this one's prompt; -1: none
    length: int  # of prompt and answer
    digest: str  # of prompt and answer
    stored: int  # tokens that the parent does not have
    sampled: int
    policy: str  # the adapter's name; "": the base model
    version: int  # the oldest one behind its tokens, of the policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts that are learned from together."""

    KIND: ClassVar[str] = "group"
    key: str
    owner: str
    size: int  # 0: only the deadline closes it
    members: tuple[str, ...]
    due: float | None  # when the next step happens by itself
    state: State = State.OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Groups lent to one trainer; `step` is None until it has consumed them."""

    KIND: ClassVar[str] = "lease"
    key: str
    groups: tuple[str, ...]
    due: float | None
    step: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How many rollouts came to this end."""

    KIND: ClassVar[str] = "count"
    key: str
    rollouts: int


Record = Rollout | Turn | Group | Lease | Count
KINDS: Mapping[str, type[Record]] = {each.KIND: each for each in (Rollout, Turn, Group, Lease, Count)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTurn:
    """What the ledger needs of a captured turn. `digest` is that of the first so many tokens."""

    request: str
    attempt: int
    prompt: int
    sampled: int
    policy: str
    version: int
    digest: Callable[[int], str]


class RolloutLedger:
    """All rollouts. Every method that changes something raises SlipstreamError before or after its changes:
    the caller undoes them."""

    def __init__(self, limits: RolloutLimits) -> None:
        self._limits = limits
        self._rollouts: dict[str, Rollout] = {}
        self._turns: dict[str, Turn] = {}
        self._groups: dict[str, Group] = {}
        self._leases: dict[str, Lease] = {}
        self._counts: dict[str, Count] = {}
        self._tables: Mapping[str, dict[str, Any]] = {
            "rollout": self._rollouts,
            "turn": self._turns,
            "group": self._groups,
            "lease": self._leases,
            "count": self._counts,
        }
        self._steps: dict[str, str] = {}  # step -> lease
        self._due: list[tuple[float, str, str]] = []  # a heap with outdated entries
        self._before: dict[tuple[str, str], Record | None] = {}  # records as they were, of unsaved changes

    # -- changes ------------------------------------------------------------------------------

    def load(self, record: Record) -> None:
        """Take a stored record."""
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
        if isinstance(former, Lease) and former.step is not None:
            self._steps.pop(former.step, None)
        if record is None:
            table.pop(key, None)
            return
        table[key] = record
        if isinstance(record, Lease) and record.step is not None:
            self._steps[record.step] = key
        due = getattr(record, "due", None)
        if due is not None and due != getattr(former, "due", None):
            heappush(self._due, (due, kind, key))

    # -- agents -------------------------------------------------------------------------------

    def open(self, request: RolloutRequest, now: float) -> None:
        """A turn of this rollout begins; the first one creates it. Raises Conflict: it takes no more turns,
        or another user began it or its group; FleetUnavailable: too many rollouts are kept."""
        self.tick(now)
        key = request.rollout_id
        if key in self._rollouts:
            rollout = self._of(key, request.owner)
            wanted = request.group or ALONE + key
            if request.group is not None and rollout.group != wanted:
                raise Conflict(f"rollout {key!r} is of the group {rollout.group!r}, not {request.group!r}")
            self._require_open(rollout)
            return
        if len(self._rollouts) >= self._limits.max_rollouts:
            raise FleetUnavailable(
                f"{len(self._rollouts)} rollouts are kept, the most that 'rollouts.max_rollouts' allows: "
                "consume or discard some"
            )
        group = self._join(request, now)
        self._put(replace(group, members=(*group.members, key)))
        self._put(Rollout(key=key, owner=request.owner, group=group.key))

    def _join(self, request: RolloutRequest, now: float) -> Group:
        name = request.group or ALONE + request.rollout_id
        group = self._groups.get(name)
        if group is None:
            limit_s = request.group_timeout_s
            due = now + (self._limits.group_timeout_s if limit_s is None else limit_s)
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
        """Add a finished turn; returns its number and record, or None: there was nothing to add, because the
        same turn, or one of a later attempt, is there. A later attempt replaces an earlier one.

        Raises:
            NotFound, Conflict: as `open`.
            PayloadTooLarge: the rollout would have more than `max_tokens`.
        """
        rollout = self._of(rollout_id, owner)
        turns = self._turns_of(rollout)
        number = next((n for n, turn in enumerate(turns) if turn.request == new.request), rollout.turns)
        former = turns[number] if number < rollout.turns else None
        if former is not None and (
            new.attempt <= former.attempt or any(turn.parent == number for turn in turns)
        ):
            return None
        self._require_open(rollout)
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
        if tokens > self._limits.max_tokens:
            raise PayloadTooLarge(
                f"rollout {rollout_id!r}: expected at most {self._limits.max_tokens} tokens "
                f"('rollouts.max_tokens'), got {tokens}"
            )
        self._put(added)
        self._put(replace(rollout, turns=max(rollout.turns, number + 1), tokens=tokens))
        return number, added

    def reward(self, rollout_id: str, owner: str, reward: Reward, key: str | None, now: float) -> None:
        """One number, one for each turn, or one for each sampled token of each turn. With the key of the
        reward that it has, nothing happens.

        Raises:
            NotFound: unknown.
            Conflict: it has a reward or no turn, is closed, consumed or discarded, or another user's.
            InvalidRequest: not finite, or not as many as turns or tokens.
        """
        self.tick(now)
        rollout = self._of(rollout_id, owner)
        if key is not None and key == rollout.reward_key:
            if reward != rollout.reward:
                raise Conflict(f"rollout {rollout_id!r}: the key {key!r} came with another reward before")
            return
        self._require_open(rollout)
        if not rollout.turns:
            raise Conflict(f"rollout {rollout_id!r} has no turn to reward")
        _check_reward(reward, [turn.sampled for turn in self._turns_of(rollout)])
        self._put(replace(rollout, state=State.REWARDED, reward=reward, reward_key=key))
        self._settle(self._groups[rollout.group], now)

    def discard(self, rollout_id: str, owner: str, now: float) -> None:
        """Nobody learns from it. Repeated calls are harmless. Raises NotFound, or Conflict: it is leased or
        consumed."""
        self.tick(now)
        rollout = self._of(rollout_id, owner)
        if rollout.state is State.DISCARDED:
            return
        group = self._groups[rollout.group]
        if group.state in (State.LEASED, State.CONSUMED):
            raise Conflict(f"rollout {rollout_id!r} is {group.state}, and cannot be discarded")
        self._end(rollout, State.DISCARDED, "discarded")
        self._settle(group, now)

    # -- trainers -----------------------------------------------------------------------------

    def lease(
        self, lease_id: str, most: int, max_staleness: int | None, current: Mapping[str, int], now: float
    ) -> tuple[Lease | None, int]:
        """Lend up to `most` closed groups, the oldest first, until they have `MAX_LEASED` tokens; None: there
        is none. Staler groups stay, and are counted in the second result.

        Args:
            max_staleness: versions between the oldest token and the policy's current one; None: any.
            current: versions by policy; groups of other policies are stale.
        """
        self.tick(now)
        chosen: list[Group] = []
        stale = tokens = 0
        for group in self._groups.values():
            if group.state is not State.REWARDED:
                continue
            if max_staleness is not None and self._staleness(group, current) > max_staleness:
                stale += 1
            elif len(chosen) < most and tokens < MAX_LEASED:
                chosen.append(group)
                tokens += sum(rollout.tokens for rollout in self.rewarded(group.key))
        if not chosen:
            return None, stale
        for group in chosen:
            self._put(replace(group, state=State.LEASED, due=None))
        lease = Lease(key=lease_id, groups=tuple(each.key for each in chosen), due=now + self._limits.lease_s)
        self._put(lease)
        return lease, stale

    def consume(self, lease_id: str, step: str, now: float) -> list[str]:
        """The trainer's step has learned from the lease's groups; returns their rollouts. The same call again
        is harmless. Raises NotFound: the lease expired; Conflict: another step consumed it, or the step
        consumed another lease."""
        self.tick(now)
        lease = self._leases.get(lease_id)
        if lease is None:
            raise NotFound(f"lease {lease_id!r} is unknown or expired: its groups may be leased again")
        if lease.step not in (None, step):
            raise Conflict(f"lease {lease_id!r} was consumed by step {lease.step!r}, got {step!r}")
        if (other := self._steps.get(step, lease_id)) != lease_id:
            raise Conflict(f"step {step!r} consumed lease {other!r}, and cannot consume {lease_id!r} too")
        consumed = [each for key in lease.groups for each in self.rewarded(key)]
        if lease.step is None:
            due = now + self._limits.keep_s
            for key in lease.groups:
                self._put(replace(self._groups[key], state=State.CONSUMED, due=due))
            self._put(replace(lease, step=step, due=due))
            self._count("consumed", len(consumed))
        return [rollout.key for rollout in consumed]

    def rewarded(self, group: str) -> list[Rollout]:
        """Those of a group's members that are learned from."""
        members = (self._rollouts[key] for key in self._groups[group].members)
        return [rollout for rollout in members if rollout.state is State.REWARDED]

    def state(self, rollout_id: str) -> State:
        """Raises NotFound."""
        rollout = self._of(rollout_id, "")
        group = self._groups[rollout.group].state
        leads = rollout.state is State.REWARDED and group in (State.LEASED, State.CONSUMED)
        return group if leads else rollout.state

    def counts(self, now: float) -> tuple[dict[str, int], dict[str, int]]:
        """Kept rollouts by state, and all that came to an end by its reason."""
        self.tick(now)
        states = dict.fromkeys(State, 0)
        for key in self._rollouts:
            states[self.state(key)] += 1
        ends = {key: count.rollouts for key, count in self._counts.items()}
        return {str(state): count for state, count in states.items()}, ends

    # -- time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Close groups, end leases and remove old records whose time has come."""
        while self._due and self._due[0][0] <= now:
            due, kind, key = heappop(self._due)
            record = self._tables[kind].get(key)
            if isinstance(record, Group) and record.due == due:
                self._group_due(record, due)
            elif isinstance(record, Lease) and record.due == due:
                if record.step is None:
                    for name in record.groups:
                        kept = due + self._limits.keep_s
                        self._put(replace(self._groups[name], state=State.REWARDED, due=kept))
                self._drop("lease", key)

    def _group_due(self, group: Group, due: float) -> None:
        if group.state is State.OPEN:
            self._settle(group, due, is_late=True)
        elif group.state is State.REWARDED:
            for rollout in self.rewarded(group.key):
                self._end(rollout, State.DISCARDED, "expired")
            self._settle(group, due)
        else:
            for key in group.members:
                for number in range(self._rollouts[key].turns):
                    self._drop("turn", f"{key}/{number}")
                self._drop("rollout", key)
            self._drop("group", group.key)

    def _settle(self, group: Group, now: float, *, is_late: bool = False) -> None:
        """Close the group if its time has come; a closed one without a rollout to learn from is discarded."""
        members = [self._rollouts[key] for key in group.members]
        settled = sum(rollout.state is not State.OPEN for rollout in members)
        is_complete = 0 < group.size <= settled
        if group.state is State.OPEN and not is_complete and not is_late:
            return
        for rollout in members:
            if rollout.state is State.OPEN:
                self._end(rollout, State.CLOSED, "unrewarded")
        state = State.REWARDED if self.rewarded(group.key) else State.DISCARDED
        if state is not group.state:
            self._put(replace(group, state=state, due=now + self._limits.keep_s))

    # -- parts --------------------------------------------------------------------------------

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

    def _turns_of(self, rollout: Rollout) -> list[Turn]:
        return [self._turns[f"{rollout.key}/{number}"] for number in range(rollout.turns)]

    def _staleness(self, group: Group, current: Mapping[str, int]) -> float:
        """Infinite for an adapter that is gone, also if another one has its name and lower versions."""
        turns = (turn for rollout in self.rewarded(group.key) for turn in self._turns_of(rollout))
        behind = [current.get(turn.policy, math.inf) - turn.version for turn in turns]
        return math.inf if min(behind) < 0 else max(behind)

    def _end(self, rollout: Rollout, state: State, reason: str) -> None:
        self._put(replace(rollout, state=state))
        if rollout.state is not State.CLOSED:  # counted when it was closed
            self._count(reason, 1)

    def _count(self, reason: str, rollouts: int) -> None:
        count = self._counts.get(reason, Count(key=reason, rollouts=0))
        self._put(replace(count, rollouts=count.rollouts + rollouts))


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
