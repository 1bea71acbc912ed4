"""How a version that its publisher does not write gets into the store: one of the replicas writes it.

    BEGIN(keep) ─► every replica keeps what it receives ─► committed ─► STORE to one of them
    its report says stored ─► FORGET to all; or why not, or it is gone ─► STORE to another one

Off the critical path: STORE is acknowledged when the writing has begun, and rounds go on meanwhile. Who
keeps which version is in every report, so a restarted controller goes on where the last one was.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deployments.errors import InvalidRequest
from deployments.ledger.decisions import Stored
from deployments.ledger.fleet import Fleet
from deployments.ledger.members import Member, MemberState, Task
from deployments.ledger.verdict import judge, sentence
from deployments.ledger.version_state import RoundBook
from deployments.protocol import InstructionKind, Report, RoundOptions, StoreResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """Attributes:
    directory: of the store, on a disk that every replica sees.
    keep: how many versions stay in it.
    """

    directory: str
    keep: int


@dataclass(slots=True, kw_only=True)
class Writing:
    version: int
    writer: Member
    due: float


class Persistence:
    def __init__(self, fleet: Fleet, book: RoundBook, place: StorePlace | None) -> None:
        self._fleet = fleet
        self._book = book
        self._place = place
        self._writing: Writing | None = None
        self._failed: dict[str, str] = {}  # replica id -> why it could not write the committed version
        self._about = 0  # the version that `_failed` and `problem` speak of
        self.problem: str | None = None  # why the committed version will not get into the store

    def allowed(self, options: RoundOptions) -> RoundOptions:
        """Without a place nothing is kept."""
        return options if self._place is not None else replace(options, persist=False)

    def set_stored(self, version: int, path: str, label: str | None, now: float) -> None:
        committed = self._book.committed_version
        if not 0 <= version <= committed:
            raise InvalidRequest(
                f"version: expected at most the committed version {committed}, got {version}",
                {"expected": committed, "actual": version},
            )
        if self._book.stored is None or version >= self._book.stored.version:
            self._book.stored = Stored(version=version, path=path, label=label)
            self._fleet.decisions.append(self._book.stored)
        self._fleet.events.record("stored", now, version=version, path=path, label=label)

    def hear(self, member: Member, report: Report, now: float) -> None:
        member.kept_version = report.kept_version
        result = report.store_result
        if result is None or result.version > self._book.committed_version:
            return
        if result.problem:
            self._could_not(result.version, member, result.problem)
        elif self._is_news(result):
            self.set_stored(result.version, result.path, result.label, now)

    def advance(self, now: float) -> None:
        for member, kept in self._kept_in_vain():
            self._fleet.order(member, InstructionKind.FORGET, {"version": kept}, now, None)
        version = None if self._place is None else self._book.unstored
        if version is None:
            self._writing = None
            self._start_over(self._book.committed_version)
            return
        self._start_over(version)
        if self._writing is not None and not self._has_ended(self._writing, version, now):
            return
        self._writing = None
        current = self._book.current
        if self.problem is None and (current is None or not current.decided):
            self._choose(version, now)

    def _choose(self, version: int, now: float) -> None:
        if any(member.state is MemberState.RETURNING for member in self._fleet.members.values()):
            return  # one that is not heard of since a restart may keep it
        keepers = [each for each in self._fleet.live() if each.kept_version == version]
        willing = [each for each in keepers if each.replica_id not in self._failed]
        assert self._place is not None, "nothing is to be stored where there is no place for it"
        if not willing:
            why = sentence(self._failed) if self._failed else "no replica has kept its tensors"
            self._give_up(version, why, now)
            return
        due = now + self._fleet.config.store_timeout_s
        self._writing = Writing(version=version, writer=willing[0], due=due)
        args = {
            "version": version,
            "label": self._book.label,
            "directory": self._place.directory,
            "keep": self._place.keep,
        }
        task = self._fleet.ask(InstructionKind.STORE, {willing[0].replica_id: args}, now, then=self._begun)
        task.result = version

    def _begun(self, task: Task, now: float) -> None:
        for replica_id, reason in judge(task).all_wrong.items():
            member = self._fleet.members.get(replica_id)
            if member is not None:
                self._could_not(task.result, member, reason)

    def _has_ended(self, writing: Writing, version: int, now: float) -> bool:
        if writing.version != version or not writing.writer.alive:
            return True
        if now > writing.due:
            # Not given to another one: two would write into the same place. If it ends late, it counts.
            limit_s = self._fleet.config.store_timeout_s
            self._give_up(version, f"{writing.writer.replica_id} did not end within {limit_s:g} s", now)
        return now > writing.due or writing.writer.replica_id in self._failed

    def _could_not(self, version: int, member: Member, reason: str) -> None:
        if version == self._about:
            self._failed[member.replica_id] = reason

    def _give_up(self, version: int, why: str, now: float) -> None:
        self.problem = f"version {version} is not in the store: {why}"
        self._fleet.events.record("not_stored", now, version=version, reason=why)

    def _start_over(self, version: int) -> None:
        if version != self._about or self._book.unstored is None:
            self._about, self.problem, self._failed = version, None, {}

    def _is_news(self, result: StoreResult) -> bool:
        return self._book.stored is None or result.version > self._book.stored.version

    def _kept_in_vain(self) -> Iterator[tuple[Member, int]]:
        stored = 0 if self._book.stored is None else self._book.stored.version
        for member in self._fleet.live():
            kept = member.kept_version
            if kept is not None and kept <= stored and not member.has_order(InstructionKind.FORGET):
                yield member, kept
