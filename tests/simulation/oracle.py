"""What must hold, looked at after every step, from what users and publishers would see."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from deployments.ledger.decisions import Committed, Decision, Fenced
from deployments.protocol.poll import CommitMode
from deployments.protocol.responses import MemberStatus
from tests.simulation.engine import FIRST


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class Oracle:
    """Collects what happened, and raises Violation when that cannot be right.

    Args:
        now: virtual seconds.
        commit: how rounds commit.
        serving: (replica, version) of those that would answer a request at this moment.
    """

    now: Callable[[], float]
    commit: CommitMode
    serving: Callable[[], list[tuple[str, int]]]
    log: Callable[..., None]
    weights: dict[int, str] = field(default_factory=lambda: {0: FIRST})  # by version
    durable: int = 0  # the newest committed version on the disk
    reported: dict[int, str] = field(default_factory=dict)  # version -> attempt, as a publisher was told
    aborted: set[str] = field(default_factory=set)  # attempts, as a publisher was told
    live: set[str] = field(default_factory=lambda: {FIRST})
    newest_answer: int = 0  # of all answers that have ended
    _ended: list[tuple[float, int]] = field(default_factory=list)  # (when, the newest version until then)
    open_since: dict[str, float] = field(default_factory=dict)  # replica -> since when it would answer
    fenced: set[str] = field(default_factory=set)  # incarnations, as the disk says
    newest_token: int = 0  # of a lease, as a publisher was told
    answers: int = 0
    lost: int = 0

    def synced(self, decisions: Sequence[Decision]) -> None:
        """They are durable."""
        for each in decisions:
            match each:
                case Committed():
                    if each.version != self.durable + 1:
                        raise Violation(f"version {each.version} was committed after {self.durable}")
                    self.durable = each.version
                case Fenced():
                    self.fenced.add(each.incarnation)

    def went_live(self, replica: str, version: int, attempt: str) -> None:
        """A replica holds these weights under this number."""
        if version > self.durable:
            raise Violation(f"{replica} holds version {version}, the disk says {self.durable}")
        named = self.weights.setdefault(version, attempt)
        if named != attempt:
            raise Violation(f"version {version} names {named} and, on {replica}, {attempt}")
        if attempt in self.aborted:
            raise Violation(f"{replica} holds {attempt}, whose publisher was told that it was aborted")
        self.live.add(attempt)

    def committed(self, version: int, attempt: str) -> None:
        """A publisher was told so."""
        self.log("{} is committed as version {}", attempt, version)
        if version > self.durable:
            raise Violation(f"a publisher was told of version {version}, the disk says {self.durable}")
        named = self.weights.get(version)
        if named is not None and named != attempt:
            raise Violation(f"a publisher was told that {attempt} is version {version}, which is {named}")
        if named is None:
            self.weights[version] = attempt
        if self.reported.get(version, attempt) != attempt:
            raise Violation(f"two publishers were told of version {version}")
        self.reported[version] = attempt

    def was_aborted(self, attempt: str, why: object) -> None:
        """A publisher was told so."""
        self.log("{} is aborted: {}", attempt, why)
        self.aborted.add(attempt)
        if attempt in self.live or attempt in self.weights.values():
            raise Violation(f"a publisher was told that {attempt} was aborted, and it is live")

    def holds(self, token: int) -> None:
        """A publisher was told that this is its lease."""
        self.newest_token = max(self.newest_token, token)

    def accepted(self, call: str, token: int, newest: int) -> None:
        """A publisher's call had an answer that is no error; `newest`: the newest token when it was sent."""
        if token < newest:
            raise Violation(f"{call} with token {token} was accepted, and {newest} had been given out")

    def has_members(self, members: Iterable[MemberStatus]) -> None:
        """What `/fleet` says."""
        for each in members:
            if each.incarnation in self.fenced and each.state in ("joining", "serving", "leaving"):
                raise Violation(f"{each.incarnation} is {each.state}, the disk says that it is fenced")

    def answered(self, replica: str, began: float, first: int, last: int) -> None:
        """A request that was sent at `began` has its answer."""
        self.answers += 1
        if last > self.durable:
            raise Violation(f"{replica} answered from version {last}, the disk says {self.durable}")
        if self.commit is CommitMode.TOGETHER:
            before = max((version for when, version in self._ended if when < began), default=0)
            if first < before:
                raise Violation(
                    f"{replica} answered from version {first} to a request of {began:.3f}, and an answer "
                    f"that had ended by then was from {before}"
                )
        if last > self.newest_answer:
            self.newest_answer = last
            self._ended.append((self.now(), last))

    def not_answered(self, began: float, why: str) -> None:
        """A request found no replica."""
        self.lost += 1
        served = [name for name, since in self.open_since.items() if since <= began]
        if served:
            raise Violation(f"a request of {began:.3f} was lost ({why}) while {served} could serve")

    def check(self) -> None:
        """After each step."""
        serving = self.serving()
        if len(serving) > 1 and self.commit is CommitMode.TOGETHER:
            version = serving[0][1]
            for _, other in serving:
                if other != version:
                    raise Violation(f"served at once: {serving}")
        for name, version in serving:
            if version > self.durable:
                raise Violation(f"{name} serves version {version}, the disk says {self.durable}")
        if len(serving) != len(self.open_since) or any(name not in self.open_since for name, _ in serving):
            now, names = self.now(), [name for name, _ in serving]
            self.open_since = {name: self.open_since.get(name, now) for name in names}
