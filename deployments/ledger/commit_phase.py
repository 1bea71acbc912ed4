"""A round after its decision: it only rolls forward. A replica that fails now is fenced, never undone.

    together: COMMIT(hold) to all ─► all swapped, or certain not to serve ─► RELEASE to all ─► finished
    rolling:  COMMIT to `max_unavailable` at a time ───────────────────────────────────────► finished

A restarted controller resumes here: each participant is waited for until it registers again, and
goes on from wherever it got to.
"""

from dataclasses import asdict

from deployments.ledger.decisions import Committed, Participant
from deployments.ledger.desired_state import Operations
from deployments.ledger.fleet import Fleet
from deployments.ledger.members import Member, MemberState, Task
from deployments.ledger.round import Round, RoundPhase
from deployments.ledger.verdict import judge
from deployments.ledger.version_state import RoundBook
from deployments.protocol import (
    Acknowledgement,
    CommitArgs,
    CommitMode,
    InstructionKind,
    Outcome,
    Report,
)


class CommitPhase:
    def __init__(self, fleet: Fleet, book: RoundBook, operations: Operations) -> None:
        self._fleet = fleet
        self._book = book
        self._operations = operations

    def decide(self, current: Round, now: float) -> None:
        """The point of no return: this decision is durable before any replica hears of it."""
        current.left_behind |= {each.replica_id: each.reason for each in current.participants if each.out}
        current.participants = tuple(current.remaining())
        participants = tuple(
            Participant(
                replica_id=member.replica_id, incarnation=member.incarnation, world_size=member.world_size
            )
            for member in current.participants
        )
        self._fleet.decisions.append(
            Committed(
                round_id=current.round_id,
                version=current.version,
                label=current.label,
                participants=participants,
                commit=current.commit,
                kv_cache=current.kv_cache,
                in_flight=current.in_flight,
                persist=current.persist,
            )
        )
        self._begin(current, now)

    def resume(self, decision: Committed, now: float) -> None:
        """Take a decided round up again in a new process, before any member has registered."""
        members = [
            self._fleet.returning(each, version=decision.version - 1, was_serving=False, now=now)
            for each in decision.participants
        ]
        current = Round(
            round_id=decision.round_id,
            version=decision.version,
            label=decision.label,
            epoch=self._fleet.epoch,
            opened=now,
            participants=tuple(member for member in members if member is not None),
            connection=None,
            manifest=None,
            commit=decision.commit,
            kv_cache=decision.kv_cache,
            in_flight=decision.in_flight,
            persist=decision.persist,
        )
        self._book.current = current
        self._begin(current, now)

    def returned(self, member: Member, report: Report, now: float) -> None:
        """A participant of a resumed round registered again: it has swapped, can swap, or starts over."""
        current = self._book.current
        member.world_size = report.world_size
        member.state = MemberState.SERVING if member.was_serving else MemberState.JOINING
        if current is None or member not in current.commits:
            if report.version != self._book.committed_version:
                member.state = MemberState.JOINING
            return
        task = current.commits[member]
        if report.version == current.version:
            task.answers[member.replica_id] = Acknowledgement(seq=0, outcome=Outcome.DONE)
            task.waiting.discard(member)
        elif report.staged_round != current.round_id:
            member.state = MemberState.JOINING
            current.left_behind[member.replica_id] = "lost its staging while the controller restarted"
            task.waiting.discard(member)
        self._roll(current, now)

    def _begin(self, current: Round, now: float) -> None:
        self._book.committed_version, self._book.label = current.version, current.label
        self._book.persist = current.persist
        self._book.enter(current, RoundPhase.COMMITTING, now)
        for member in current.participants:
            current.commits[member] = self._fleet.expect(
                InstructionKind.COMMIT,
                [member],
                then=self._swapped,
                round_id=current.round_id,
                certain=True,
            )
        self._roll(current, now)

    def _roll(self, current: Round, now: float) -> None:
        """Give COMMIT to as many as may be unavailable at once, then look whether all are through."""
        together = current.commit is CommitMode.TOGETHER
        limit = len(current.participants) if together else self._fleet.config.max_unavailable
        busy = [member for member in current.ordered if not current.commits[member].done]
        ready = [
            member
            for member, task in current.commits.items()
            if member.alive and task.waiting and member not in current.ordered
        ]
        for member in ready[: max(0, limit - len(busy))]:
            current.ordered.add(member)
            self._order_commit(current, member, now)
        through = all(task.done for task in current.commits.values())
        if current.phase is RoundPhase.COMMITTING and through:
            self._release(current, now)

    def _order_commit(self, current: Round, member: Member, now: float) -> None:
        args = CommitArgs(
            round_id=current.round_id,
            version=current.version,
            label=current.label,
            hold=current.hold,
            kv_cache=current.kv_cache,
            in_flight=current.in_flight,
        )
        self._fleet.order(member, InstructionKind.COMMIT, asdict(args), now, current.commits[member])

    def _swapped(self, task: Task, now: float) -> None:
        current = self._book.current
        assert current is not None and current.round_id == task.round_id, "a decided round outlives its tasks"
        current.note(task)
        verdict = judge(task)
        for member in current.participants:
            if member.replica_id not in task.answers or current.commits[member] is not task:
                continue
            reason = verdict.all_wrong.get(member.replica_id)
            if reason is None and member.version != current.version:
                reason = f"acknowledged version {current.version} but holds {member.version}"
            if reason is not None:
                self._fence_until_certain(current, member, f"commit: {reason}", now)
        task.finish()
        self._roll(current, now)

    def _fence_until_certain(self, current: Round, member: Member, reason: str, now: float) -> None:
        """It answered, yet might still take requests: the round waits until it was told, or is gone."""
        if member.out:
            return
        current.commits[member] = self._fleet.expect(
            InstructionKind.COMMIT, [member], then=self._swapped, round_id=current.round_id, certain=True
        )
        self._fleet.fence(member, reason, now)

    def _release(self, current: Round, now: float) -> None:
        if not current.hold:
            self._finish(current, now)
            return
        self._book.enter(current, RoundPhase.RELEASING, now)
        args = {
            member.replica_id: {"round_id": current.round_id}
            for member in current.participants
            if member.alive and member.replica_id not in current.left_behind
        }
        self._fleet.ask(InstructionKind.RELEASE, args, now, then=self._released, round_id=current.round_id)

    def _released(self, task: Task, now: float) -> None:
        current = self._book.current
        assert current is not None and current.round_id == task.round_id, "a decided round outlives its tasks"
        current.note(task)
        self._fleet.fence_each(judge(task).all_wrong, "release", now)
        self._finish(current, now)

    def _finish(self, current: Round, now: float) -> None:
        self._operations.weights_came()
        self._book.finish(current, now)
