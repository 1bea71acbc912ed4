"""A round after its decision: it only rolls forward. A replica that fails now is fenced, nothing is undone.

    together: COMMIT(hold) to all ─► all swapped, or certain not to serve ─► RELEASE to all ─► finished
    rolling:  (DRAIN) COMMIT to `max_unavailable` at a time ─────────────────────────────────► finished

A restarted controller resumes here: each participant is waited for until it registers again, and
continues from its own state.
"""

from functools import partial

from deployments.ledger.decisions import Committed, DecisionLog, Participant
from deployments.ledger.desired_state import DesiredState
from deployments.ledger.dispatch import Dispatch, Drains, PendingDrain
from deployments.ledger.members import Member, MemberState, PendingCall, classify
from deployments.ledger.membership import Membership
from deployments.ledger.rounds.round import Round, RoundPhase
from deployments.ledger.rounds.version_state import VersionState
from deployments.protocol.engine_state import InFlight
from deployments.protocol.poll import (
    Acknowledgement,
    Commit,
    CommitMode,
    Outcome,
    Release,
    Report,
    drain_of_round,
)
from deployments.protocol.publishing import DrainFallback


class CommitPhase:
    """The round in flight from its decision to its end."""

    def __init__(
        self,
        membership: Membership,
        dispatch: Dispatch,
        versions: VersionState,
        desired_state: DesiredState,
        decisions: DecisionLog,
        drains: Drains,
    ) -> None:
        self._drains = drains
        self._membership = membership
        self._dispatch = dispatch
        self._versions = versions
        self._desired_state = desired_state
        self._decisions = decisions

    def decide(self, current: Round, now: float) -> None:
        """The point of no return: this decision is durable before any replica learns of it."""
        current.left_behind |= {each.replica_id: each.reason for each in current.participants if each.out}
        current.participants = tuple(current.remaining())
        participants = tuple(
            Participant(
                replica_id=member.replica_id, incarnation=member.incarnation, world_size=member.world_size
            )
            for member in current.participants
        )
        self._decisions.append(
            Committed(
                round_id=current.round_id,
                version=current.version,
                label=current.label,
                participants=participants,
                commit=current.commit,
                kv_cache=current.kv_cache,
                in_flight=current.in_flight,
                persist=current.persist,
                verification=current.verification,
                checks=current.checks,
                digest=current.digest,
            )
        )
        self._begin(current, now)

    def resume(self, decision: Committed, now: float) -> None:
        """Resume a decided round in a new process, before any member has registered."""
        members = [
            self._membership.recover_member(each, version=decision.version - 1, was_serving=False, now=now)
            for each in decision.participants
        ]
        current = Round(
            round_id=decision.round_id,
            version=decision.version,
            label=decision.label,
            epoch=self._membership.epoch,
            opened_at=now,
            participants=tuple(member for member in members if member is not None),
            connection=None,
            commit=decision.commit,
            kv_cache=decision.kv_cache,
            in_flight=decision.in_flight,
            drain_timeout_s=self._membership.config.drain_timeout_s,
            drain_fallback=self._membership.config.drain_fallback,
            persist=decision.persist,
            verification=decision.verification,
            checks=decision.checks,
            digest=decision.digest,
            decided_for=len(decision.participants),
        )
        self._begin(current, now)

    def on_return(self, member: Member, report: Report, now: float) -> None:
        """A member from before a restart polled again: it has swapped, can swap, or starts over."""
        current = self._versions.current
        member.world_size = report.world_size
        member.state = MemberState.SERVING if member.was_serving else MemberState.JOINING
        if current is None or member not in current.commits:
            if report.version != self._versions.committed_version:
                member.state = MemberState.JOINING
            return
        call = current.commits[member]
        if report.version == current.version:
            call.answers[member.replica_id] = Acknowledgement(seq=0, outcome=Outcome.DONE)
            call.stop_waiting_for(member)
        elif report.staged_round != current.round_id:
            reason = "lost its staging while the controller restarted"
            if current.hold:  # it still serves the old version: nobody is released before it has stopped
                self._fence_until_certain(current, member, reason, now)
            else:
                member.state = MemberState.JOINING
                current.left_behind[member.replica_id] = reason
                call.stop_waiting_for(member)

    def _begin(self, current: Round, now: float) -> None:
        self._versions.commit(current, now)
        for member in current.participants:
            self._expect_commit(current, member)

    def _expect_commit(self, current: Round, member: Member) -> None:
        together = current.commit is CommitMode.TOGETHER  # nothing follows before the last has swapped
        if together:
            current.swapping.add(member)
        current.commits[member] = self._dispatch.expect(
            Commit.name,
            [member],
            on_complete=partial(self._swapped, member=member),
            round_id=current.round_id,
            certain=True,
            batch=current.swapping if together else None,
        )

    def advance(self, now: float) -> bool:
        """Send COMMIT to as many as may be unavailable at once; release when all have swapped.

        Returns:
            Whether the round went on to its next phase.
        """
        current = self._versions.current
        if current is None or current.phase is not RoundPhase.COMMITTING:
            return False
        together = current.commit is CommitMode.TOGETHER
        limit = len(current.participants) if together else self._membership.config.max_unavailable
        busy = [member for member in current.ordered if not current.commits[member].done]
        ready = [
            member
            for member, call in current.commits.items()
            if member.alive and call.waiting and member not in current.ordered
        ]
        for member in ready[: max(0, limit - len(busy))]:
            current.ordered.add(member)
            if not together and current.must_drain:
                self._drain(current, member, now)
            else:
                self._send_commit(current, member, now)
        all_done = all(call.done for call in current.commits.values())
        if all_done:
            self._release(current, now)
        return all_done

    def _drain(self, current: Round, member: Member, now: float) -> None:
        """Let its requests end first. The round is decided: those that do not end in time are kept."""

        def ended(drain: PendingDrain, now: float) -> None:
            current.not_drained |= drain.late
            if member.alive and member in current.commits[member].waiting:
                self._send_commit(current, member, now)

        self._drains.begin(
            drain_of_round(current.round_id),
            [member],
            now,
            what=f"round {current.round_id}",
            timeout_s=current.drain_timeout_s,
            then=DrainFallback.KEEP.value,
            on_end=ended,
        )

    def _send_commit(self, current: Round, member: Member, now: float) -> None:
        body = Commit(
            round_id=current.round_id,
            version=current.version,
            hold=current.hold,
            kv_cache=current.kv_cache,
            in_flight=InFlight.KEEP if member.replica_id in current.not_drained else current.in_flight,
        )
        self._dispatch.queue(member, body, now, current.commits[member])

    def _swapped(self, call: PendingCall, now: float, *, member: Member) -> None:
        current = self._decided(call)
        current.record(call)
        if member.replica_id in call.answers and current.commits[member] is call:
            reason = classify(call).not_done.get(member.replica_id)
            if reason is None and member.version != current.version:
                reason = f"acknowledged version {current.version} but holds {member.version}"
            if reason is not None:
                self._fence_until_certain(current, member, f"commit: {reason}", now)
        call.finish()

    def _fence_until_certain(self, current: Round, member: Member, reason: str, now: float) -> None:
        """It answered, yet may still take requests: the round waits until the fence is delivered, or it is
        gone."""
        if member.out:
            return
        self._expect_commit(current, member)
        self._membership.fence(member, reason, now)

    def _release(self, current: Round, now: float) -> None:
        if not current.hold:
            self._finish(now)
            return
        self._versions.enter(RoundPhase.RELEASING, now)
        bodies = {
            member: Release(round_id=current.round_id)
            for member in current.participants
            if member.alive and member.replica_id not in current.left_behind
        }
        self._dispatch.send_each(
            Release.name, bodies, now, on_complete=self._released, round_id=current.round_id
        )

    def _released(self, call: PendingCall, now: float) -> None:
        current = self._decided(call)
        current.record(call)
        self._membership.fence_each(classify(call).not_done, Release.name, now)
        self._finish(now)

    def _finish(self, now: float) -> None:
        self._drains.forget(drain_of_round(self._decided_round().round_id))
        self._desired_state.on_weights_replaced()
        self._versions.finish(now)

    def _decided(self, call: PendingCall) -> Round:
        current = self._decided_round()
        assert current.round_id == call.round_id, "a decided round outlives its calls"
        return current

    def _decided_round(self) -> Round:
        current = self._versions.current
        assert current is not None and current.decided
        return current
