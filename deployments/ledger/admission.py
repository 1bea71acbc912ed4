"""How a replica becomes a member, catches up, is admitted, and what it is told in each poll.

A joiner serves only the committed version: it loads it from the store, or gets it in the next round,
in which it takes part like everybody. It is paused or put to sleep first if the fleet is. It is admitted
between rounds, or during the staging of one that it takes part in; never between a round's decision and
its end.
"""

from typing import Any

from deployments.ledger.commit_phase import CommitPhase
from deployments.ledger.connections import Connections
from deployments.ledger.desired_state import Operations
from deployments.ledger.fleet import Fleet
from deployments.ledger.members import Member, MemberState, Task
from deployments.ledger.staging_phase import StagingPhase
from deployments.ledger.store_assignment import Persistence
from deployments.ledger.verdict import judge
from deployments.ledger.version_state import RoundBook
from deployments.protocol import Directive, InstructionKind, JoinAnswer, Report


class Admission:
    def __init__(
        self,
        fleet: Fleet,
        book: RoundBook,
        commit_phase: CommitPhase,
        staging: StagingPhase,
        connections: Connections,
        persistence: Persistence,
        operations: Operations,
    ) -> None:
        self._fleet = fleet
        self._book = book
        self._commit_phase = commit_phase
        self._staging = staging
        self._connections = connections
        self._persistence = persistence
        self._operations = operations

    def first_weights(self) -> JoinAnswer:
        if self._book.stored is None:
            return JoinAnswer(version=0, path=None, label=None)
        return JoinAnswer(
            version=self._book.stored.version, path=self._book.stored.path, label=self._book.stored.label
        )

    # -- polls --------------------------------------------------------------------------------

    def hear(self, report: Report, now: float) -> None:
        new = self._member(report) is None
        member = self._fleet.register(report, now)
        if member is None or member.out:
            return
        member.seen, member.version = now, report.version
        self._persistence.hear(member, report, now)
        if member.state is MemberState.RETURNING:
            self._commit_phase.returned(member, report, now)
        elif new:
            self._connections.welcome(member, now)
        self._fleet.hear(member, report.acknowledgements, now)
        self._fleet.settle(now)
        self._check_version(member, now)
        self._drop_leftovers(member, report, now)

    def directive(self, report: Report) -> Directive:
        fence = self._fleet.fences.get(report.incarnation)
        heard = tuple(each.seq for each in report.acknowledgements)
        member = self._member(report)
        if member is not None:
            member.told = self._news(report)
            for order in member.orders:
                order.delivered = True
            if member.out:
                self._fleet.told_fence(member)
        return Directive(
            admitted=member is not None and member.state is MemberState.SERVING,
            committed_version=self._book.committed_version,
            epoch=self._fleet.epoch,
            instructions=() if member is None else tuple(order.instruction for order in member.orders),
            heard=heard,
            fenced=None if fence is None else fence.reason,
        )

    def has_news(self, report: Report) -> bool:
        member = self._member(report)
        if report.acknowledgements or member is None or member.out:
            return True
        return member.told != self._news(report)

    def _member(self, report: Report) -> Member | None:
        member = self._fleet.members.get(report.replica_id)
        return member if member is not None and member.incarnation == report.incarnation else None

    def _news(self, report: Report) -> tuple[Any, ...]:
        member = self._member(report)
        assert member is not None, "only members are told anything new"
        last_seq = member.orders[-1].instruction.seq if member.orders else 0
        told_seq = 0 if member.told is None else member.told[-1]
        return (
            member.state,
            self._book.committed_version,
            self._fleet.epoch,
            max(last_seq, told_seq),
        )

    def _check_version(self, member: Member, now: float) -> None:
        """A replica that holds what the fleet did not commit is never trusted again."""
        committed = self._book.committed_version
        current = self._book.current
        swapping = current is not None and current.decided and member in current.commits
        if member.version > committed:
            self._fleet.fence(
                member, f"holds version {member.version}, the fleet never went past {committed}", now
            )
        elif member.state is MemberState.SERVING and member.version != committed and not swapping:
            self._fleet.fence(member, f"serves version {member.version}, the fleet is at {committed}", now)

    def _drop_leftovers(self, member: Member, report: Report, now: float) -> None:
        """Staging of a round that ended, or that a restarted controller never decided."""
        current = self._book.current
        known = current is not None and current.round_id == report.staged_round
        if member.alive and report.staged_round is not None and not known:
            self._staging.drop(member, report.staged_round, now)

    # -- what follows -------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        in_round = self._book.current is not None
        for member in self._fleet.live():
            if member.state is not MemberState.JOINING:
                continue
            if member.version != self._book.committed_version:
                self._catch_up(member, now)
            elif self._admissible(member) and self._operations.bring(member, now, in_round=in_round):
                self._fleet.admit(member, now)

    def _admissible(self, member: Member) -> bool:
        current = self._book.current
        return current is None or (not current.decided and member in current.participants)

    def _catch_up(self, member: Member, now: float) -> None:
        stored = self._book.stored
        if self._book.current is not None or member.has_order(InstructionKind.CATCH_UP):
            return
        if stored is None or stored.version != self._book.committed_version:
            return  # the next round, or the next save, brings it up
        args = {"version": stored.version, "path": stored.path, "label": stored.label}
        task = self._fleet.ask(InstructionKind.CATCH_UP, {member.replica_id: args}, now, then=self._caught_up)
        task.result = stored.version

    def _caught_up(self, task: Task, now: float) -> None:
        """It holds what it was told to load, or nobody knows what it holds."""
        reasons = judge(task).all_wrong
        for replica_id in judge(task).done:
            member = self._fleet.members[replica_id]
            if member.version != task.result:
                reasons[replica_id] = f"loaded version {task.result} but holds {member.version}"
        self._fleet.fence_each(reasons, "catch_up", now)
