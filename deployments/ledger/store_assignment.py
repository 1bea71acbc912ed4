"""How a version that its publisher does not write gets into the store: one of the replicas writes it.

    RECEIVE(retain_version) ─► every replica retains what it receives ─► committed ─► STORE to one of them
    its report says stored ─► FORGET to all; or a problem, or it is gone ─► STORE to another one
    nobody could ─► the status says so, and it is tried again every `RETRY_S`: the disk may have space then
    it is late ─► the status says so, and another one gets STORE after `RETRY_S`, or at once if it is gone

Off the critical path: STORE is acknowledged when the write has begun, and rounds go on meanwhile. Which
version a replica retains is in every report, so a restarted controller continues where its predecessor was.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deployments.ledger.decisions import EventLog, Stored
from deployments.ledger.dispatch import Dispatch
from deployments.ledger.members import Member, MemberState, PendingCall, classify, join_reasons
from deployments.ledger.membership import Membership
from deployments.ledger.rounds.version_state import VersionState
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.poll import Forget, Report, StoreResult, WriteVersion
from deployments.protocol.publishing import RoundOptions

RETRY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLocation:
    """Where replicas write versions."""

    directory: str  # on a disk that every replica sees


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    version: int
    writer: Member
    due: float


class StoreAssignment:
    """Assigns the write of the committed version to a replica that retains it."""

    def __init__(
        self,
        membership: Membership,
        dispatch: Dispatch,
        versions: VersionState,
        events: EventLog,
        location: StoreLocation | None,
    ) -> None:
        self._membership = membership
        self._dispatch = dispatch
        self._versions = versions
        self._events = events
        self._location = location
        self._write: _Write | None = None
        self._failed: dict[str, str] = {}  # replica id -> why it could not write the committed version
        self._subject = 0  # the version that `_failed` and `problem` are about
        self._problem: str | None = None
        self._late: list[Member] = []  # writers that did not end in time, and may yet
        self._retry_at: float | None = None  # nobody is asked before; None: it is not given up
        self._last_writer: Member | None = None

    @property
    def problem(self) -> str | None:
        """Why the committed version is not in the store."""
        return self._problem

    def permitted(self, options: RoundOptions) -> RoundOptions:
        """Without a location nothing is retained."""
        return options if self._location is not None else replace(options, persist=False)

    def set_stored(self, version: int, path: str, label: str | None, now: float) -> None:
        """A version is complete on disk.

        Raises:
            InvalidRequest: the fleet never committed it.
        """
        committed = self._versions.committed_version
        if not 0 <= version <= committed:
            raise InvalidRequest(
                f"version: expected at most the committed version {committed}, got {version}",
                {"expected": committed, "actual": version},
            )
        self._versions.set_stored(Stored(version=version, path=path, label=label), now)

    def on_report(self, member: Member, report: Report, now: float) -> bool:
        """Take in what a member retains, and how its last write ended. True if something may follow."""
        before, member.retained_version = member.retained_version, report.retained_version
        result = report.store_result
        if result is not None and result.version <= self._versions.committed_version:
            if result.problem and not member.has_queued(WriteVersion):  # else of an earlier attempt
                if self._record_failure(result.version, member, result.problem):
                    return True
            elif not result.problem and self._is_newest(result):
                self.set_stored(result.version, result.path, result.label, now)
                return True
        return member.retained_version != before and self._concerns(member)

    def credit(self, stalled_s: float) -> None:
        """The writer could not say for so long that it is done."""
        if self._write is not None:
            self._write = replace(self._write, due=self._write.due + stalled_s)

    def advance(self, now: float) -> None:
        """Free what is stored; assign the committed version to a writer if it has none."""
        for member, retained in self._obsolete():
            self._dispatch.queue(member, Forget(version=retained), now, None)
        version = None if self._location is None else self._versions.unstored
        if version is None:
            self._write = None
            self._start_over(self._versions.committed_version)
            return
        self._start_over(version)
        if self._write is not None and not self._has_ended(self._write, version, now):
            return
        self._write = None
        current = self._versions.current
        if current is not None and current.decided:
            return
        late = [each for each in self._late if each.alive and each.replica_id not in self._failed]
        if len(late) < len(self._late):
            self._late, self._retry_at = late, None  # one will not end any more
        elif self._retry_at is not None and now >= self._retry_at:
            self._failed, self._retry_at = {}, None
        if self._retry_at is None:
            self._assign(version, now)

    def _assign(self, version: int, now: float) -> None:
        if self._membership.returning():
            return  # one that has not polled since a restart may retain it
        holders = [each for each in self._membership.live() if each.retained_version == version]
        # One that is late still writes: asked again, it could only wait for the same disk.
        candidates = [
            each for each in holders if each.replica_id not in self._failed and each not in self._late
        ]
        assert self._location is not None, "nothing is assigned without a location"
        if not candidates:
            self._give_up(version, now)
            return
        candidates.sort(key=lambda each: each is self._last_writer)  # after a failure, another one first
        self._last_writer = candidates[0]
        due = now + self._membership.config.store_timeout_s
        self._write = _Write(version=version, writer=candidates[0], due=due)
        body = WriteVersion(
            version=version,
            label=self._versions.label,
            directory=self._location.directory,
            fleet_id=self._versions.fleet_id,
            digest=self._versions.digest_of(version),
        )
        bodies = {candidates[0]: body}
        call = self._dispatch.send_each(WriteVersion.name, bodies, now, on_complete=self._begun)
        call.result = version

    def _begun(self, call: PendingCall, now: float) -> None:
        for replica_id, reason in classify(call).not_done.items():
            member = self._membership.get(replica_id)
            if member is not None:
                self._record_failure(call.result, member, reason)

    def _has_ended(self, write: _Write, version: int, now: float) -> bool:
        writer = write.writer
        if write.version != version or not writer.alive or writer.replica_id in self._failed:
            return True
        if now > write.due:
            # If it ends late, it counts. Two may write at once: each has a directory of its own.
            self._late.append(writer)
            self._give_up(version, now)
        return now > write.due

    def _concerns(self, member: Member) -> bool:
        """Whether what it retains is to be freed, or could be written now."""
        retained, current = member.retained_version, self._versions.current
        if retained is None:
            return False
        in_commit = current is not None and current.decided  # its end looks at all
        return retained <= self._versions.stored_version or (
            retained == self._versions.unstored and not in_commit
        )

    def _record_failure(self, version: int, member: Member, reason: str) -> bool:
        """True if it is not known yet."""
        if version != self._subject or self._failed.get(member.replica_id) == reason:
            return False
        self._failed[member.replica_id] = reason
        return True

    def _give_up(self, version: int, now: float) -> None:
        late = f"did not end within {self._membership.config.store_timeout_s:g} s"
        reasons = {each.replica_id: late for each in self._late} | self._failed
        why = join_reasons(dict(sorted(reasons.items()))) if reasons else "no replica retains its tensors"
        before, self._problem = self._problem, f"version {version} is not in the store: {why}"
        self._retry_at = now + RETRY_S
        if self._problem != before:
            self._events.record("not_stored", now, version=version, reason=why)

    def _start_over(self, version: int) -> None:
        if version != self._subject or self._versions.unstored is None:
            self._subject, self._problem, self._failed = version, None, {}
            self._late, self._retry_at, self._last_writer = [], None, None

    def _is_newest(self, result: StoreResult) -> bool:
        return self._versions.stored is None or result.version > self._versions.stored.version

    def _obsolete(self) -> Iterator[tuple[Member, int]]:
        """Members that retain a version which is in the store, or an older one."""
        for member in self._membership.live():
            retained = member.retained_version
            if retained is None or retained > self._versions.stored_version:
                continue
            # It may have been told to forget an older one, while it took part in a round.
            bodies = (queued.instruction.body for queued in member.queue)
            if not any(isinstance(body, Forget) and body.version >= retained for body in bodies):
                yield member, retained


class StoreWait:
    """Whether replicas wait in vain for a version that its publisher was to write.

    The trainer writes its versions itself, and may fail to: its disk is full, or it is gone. A replica that
    joins then waits, for the store or for the next round, while others serve. The status says so at once if
    the trainer does, else after `store_timeout_s`.
    """

    def __init__(self, membership: Membership, versions: VersionState, events: EventLog) -> None:
        self._membership = membership
        self._versions = versions
        self._events = events
        self._version = 0  # that is waited for
        self._since: float | None = None  # None: nobody waits
        self._problem: str | None = None
        self._failed: tuple[int, str] | None = None  # the version that its publisher could not write, and why

    @property
    def problem(self) -> str | None:
        """What could not be written, or who waits for what; None while there is hope."""
        if self._failed is not None:
            version, reason = self._failed
            return f"version {version} is not in the store: {reason}"
        return self._problem

    def failed(self, version: int, reason: str, now: float) -> None:
        """The publisher could not write this version."""
        if version == self._versions.committed_version != self._versions.stored_version:
            self._failed = version, reason
            self._events.record("not_stored", now, version=version, reason=reason)

    def credit(self, stalled_s: float) -> None:
        """The version could not be reported as stored for so long."""
        if self._since is not None:
            self._since += stalled_s

    def advance(self, now: float) -> None:
        """Look at who waits."""
        version, waiting = self._versions.committed_version, self._waiting()
        if self._failed is not None and (
            self._failed[0] != version or self._versions.stored_version == version
        ):
            self._failed = None
        if not waiting:
            self._since = self._problem = None
        elif self._since is None or version != self._version:
            self._version, self._since, self._problem = version, now, None
        elif self._problem is None and now - self._since > self._membership.config.store_timeout_s:
            reason = f"its publisher has not written it, and {waiting} wait for it: publish again"
            self._problem = f"version {version} is not in the store: {reason}"
            self._events.record("not_stored", now, version=version, reason=reason)

    def _waiting(self) -> list[str]:
        """Joiners that need a version which no replica was asked to write."""
        committed = self._versions.committed_version
        if self._versions.stored_version == committed or self._versions.unstored is not None:
            return []
        live = self._membership.live()
        joining = [each for each in live if each.state is MemberState.JOINING]
        return [each.replica_id for each in joining if each.version != committed]
