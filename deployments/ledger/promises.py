"""What joiners were promised: the stored version that each was told to load stays on the disk meanwhile.

    join, or CATCH_UP ─► promised ─► it holds the version, is gone, or had `join_timeout_s`: ended

A starting engine takes long, and quick rounds store several versions meanwhile. Which versions may be
removed is therefore decided here and not by those who write them. Promises are decisions: a restarted
controller keeps them. Beside `keep` versions at most one for each replica that starts or catches up stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.ledger.decisions import DecisionLog, EventLog, Promised, PromiseEnded
from deployments.ledger.members import MemberState
from deployments.ledger.membership import Membership
from deployments.ledger.rounds.version_state import VersionState

LOSSES = 3  # replicas lost in a row while they loaded one version
AGAIN_S = 600.0  # then it is tried again: what ended them may have been something else


@dataclass(slots=True)
class _Promise:
    promised: Promised
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    replica_id: str
    version: int
    reason: str
    since: float


@dataclass(slots=True)
class _Losses:
    """Replicas, by incarnation, that were lost in a row while they loaded one version."""

    version: int
    replicas: dict[str, str]
    last: float


class Promises:
    """The versions that joiners were told to load, and those that they could not load; by incarnation."""

    def __init__(
        self, membership: Membership, versions: VersionState, decisions: DecisionLog, events: EventLog
    ) -> None:
        self._membership = membership
        self._versions = versions
        self._decisions = decisions
        self._events = events
        self._promises: dict[str, _Promise] = {}
        self._refusals: dict[str, _Refusal] = {}
        self._losses = _Losses(0, {}, 0.0)

    @property
    def problem(self) -> str | None:
        """Which joiner cannot load the committed version from the store."""
        committed, lost = self._versions.committed_version, self._losses.replicas
        if self._is_given_up(committed):
            names = ", ".join(lost.values())
            return f"version {committed} does not load: {len(lost)} replicas were lost in it ({names})"
        for each in self._refusals.values():
            if each.version == committed:
                return f"{each.replica_id} cannot load version {each.version} from the store: {each.reason}"
        return None

    def made(self, incarnation: str) -> Promised | None:
        """What this process was promised, if anything."""
        promise = self._promises.get(incarnation)
        return None if promise is None else promise.promised

    def promise(self, replica_id: str, incarnation: str, version: int, path: str, now: float) -> None:
        """This process is told to load a stored version; an earlier promise to it ends."""
        promised = Promised(replica_id=replica_id, incarnation=incarnation, version=version, path=path)
        before = self._promises.get(incarnation)
        if before is None or before.promised != promised:
            self._decisions.append(promised)
        self._promises[incarnation] = _Promise(promised, now)

    def refuse(self, replica_id: str, incarnation: str, version: int, reason: str, now: float) -> None:
        """This process cannot load a version: it is not told to again.

        It may have been told of another one since: a question that comes late, or twice, does not end that.
        """
        made = self.made(incarnation)
        if made is not None and made.version != version:
            return
        self.end(incarnation)
        self._refusals[incarnation] = _Refusal(
            replica_id=replica_id, version=version, reason=reason, since=now
        )
        self._events.record("unloadable", now, replica=replica_id, version=version, reason=reason)

    def refused(self, incarnation: str, version: int) -> bool:
        """Whether this process could not load this version, or so many others were lost in it."""
        if self._is_given_up(version):
            return True
        refusal = self._refusals.get(incarnation)
        return refusal is not None and refusal.version == version

    def lost(self, replica_id: str, incarnation: str, version: int | None, now: float) -> None:
        """This process was lost while it loaded a version; None: what it was promised, if anything.

        One may be bad luck. After `LOSSES` in a row the version is given up for a while: engines cannot load
        it although its files are intact. Those that start load what the fleet started from instead, and the
        next round brings them up to date.
        """
        promise = self._promises.get(incarnation)
        self.end(incarnation)
        if version is None and promise is not None:
            version = promise.promised.version
        if version is None or incarnation in self._losses.replicas:
            return
        if version != self._losses.version:
            self._losses = _Losses(version, {}, now)
        self._losses.replicas[incarnation], self._losses.last = replica_id, now
        if len(self._losses.replicas) == LOSSES:
            names = ", ".join(self._losses.replicas.values())
            self._events.record("given_up", now, version=version, replicas=names, again_s=AGAIN_S)

    def _is_given_up(self, version: int) -> bool:
        return len(self._losses.replicas) >= LOSSES and self._losses.version == version

    def end(self, incarnation: str) -> None:
        """The process is gone, or holds what it was promised."""
        if self._promises.pop(incarnation, None) is not None:
            self._decisions.append(PromiseEnded(incarnation=incarnation))
        self._refusals.pop(incarnation, None)

    def starting(self, before: float) -> list[tuple[str, str]]:
        """(replica id, incarnation) of those that asked before this time and have not registered."""
        asked = [(each.promised.replica_id, key, each.since) for key, each in self._promises.items()]
        asked += [(each.replica_id, key, each.since) for key, each in self._refusals.items()]
        return [
            (replica_id, incarnation)
            for replica_id, incarnation, since in asked
            if since < before and self._membership.find(replica_id, incarnation) is None
        ]

    @property
    def fleet_id(self) -> str:
        return self._versions.fleet_id

    def foreign(self, on_disk: Mapping[int, str | None]) -> dict[int, str | None]:
        """Of the versions in the store, with the fleet id of each, those of another fleet."""
        return {version: owner for version, owner in on_disk.items() if owner != self._versions.fleet_id}

    def removable(self, on_disk: Mapping[int, str | None], keep: int) -> list[int]:
        """Of the versions in the store, with the fleet id of each, those that nobody needs, oldest first.

        All of this fleet but the newest `keep`, the newest that is known to be complete, and those that were
        promised.
        """
        stored = self._versions.stored_version
        ordered = sorted(on_disk.keys() - self.foreign(on_disk).keys())
        needed = {*ordered[-keep:], *(each.promised.version for each in self._promises.values())}
        return [version for version in ordered if version < stored and version not in needed]

    def advance(self, now: float) -> None:
        """End the promises that are kept, and those that nobody can want any more."""
        limit_s = self._membership.config.join_timeout_s
        if now - self._losses.last > AGAIN_S:
            self._losses.replicas.clear()
        for incarnation, each in list(self._promises.items()):
            replica_id, version = each.promised.replica_id, each.promised.version
            if self._is_over(replica_id, incarnation, version):
                if self._holds(replica_id, incarnation, version) and version == self._losses.version:
                    self._losses.replicas.clear()
                self.end(incarnation)
            elif now - each.since > limit_s:
                self._events.record(
                    "promise_lapsed", now, replica=replica_id, version=version, limit_s=limit_s
                )
                self.end(incarnation)
        for incarnation, refusal in list(self._refusals.items()):
            member = self._membership.find(refusal.replica_id, incarnation)
            serves = member is not None and member.state is MemberState.SERVING
            if serves or now - refusal.since > limit_s or self._is_gone(refusal.replica_id, incarnation):
                del self._refusals[incarnation]

    def credit(self, stalled_s: float) -> None:
        """No joiner could say for so long what it holds."""
        for each in self._promises.values():
            each.since += stalled_s

    def recover(self, promised: Promised, now: float) -> None:
        self._promises[promised.incarnation] = _Promise(promised, now)

    def recover_end(self, incarnation: str) -> None:
        self._promises.pop(incarnation, None)

    def _is_over(self, replica_id: str, incarnation: str, version: int) -> bool:
        return self._holds(replica_id, incarnation, version) or self._is_gone(replica_id, incarnation)

    def _holds(self, replica_id: str, incarnation: str, version: int) -> bool:
        member = self._membership.find(replica_id, incarnation)
        return member is not None and member.alive and member.version >= version

    def _is_gone(self, replica_id: str, incarnation: str) -> bool:
        if self._membership.fence_of(incarnation) is not None:
            return True
        member = self._membership.get(replica_id)
        return member is not None and member.incarnation != incarnation
