"""A round until its decision: opened, staged, closed and verified, or aborted. No live weight is touched.

open ─► send* ─► RECEIVE ─► close ─► VERIFY ─► digests equal ─► (DRAIN) ─► the decision to commit
  └─────────── abort: publisher, lease, wrong payload, failed transfer, too few replicas ─► DROP

With `in_flight: wait` running requests end before the decision, or before RECEIVE if it changes live weights.
"""

from collections.abc import Callable, Mapping

from pydantic import JsonValue

from deployments.ledger.connection import Connection, Connections, split_payload
from deployments.ledger.dispatch import Dispatch, Drains, PendingDrain
from deployments.ledger.members import Member, PendingCall, classify, digest_minority, join_reasons
from deployments.ledger.membership import Membership
from deployments.ledger.rounds.commit_phase import CommitPhase
from deployments.ledger.rounds.round import (
    Round,
    RoundPhase,
    files_refused,
    new_round,
    not_drained,
    rejected_by_all,
    too_few_remain,
    transfer_failed,
)
from deployments.ledger.rounds.version_state import VersionState
from deployments.protocol.engine_state import InFlight
from deployments.protocol.errors import Conflict, FleetUnavailable, RoundAborted, SlipstreamError
from deployments.protocol.poll import (
    Body,
    CatchUp,
    CommitMode,
    Drop,
    FilePart,
    Receive,
    Verify,
    drain_of_round,
)
from deployments.protocol.publishing import DrainFallback, RoundOptions


class StagingPhase:
    """The round in flight as long as it is not decided."""

    def __init__(
        self,
        membership: Membership,
        dispatch: Dispatch,
        versions: VersionState,
        commit_phase: CommitPhase,
        connections: Connections,
        drains: Drains,
    ) -> None:
        self._drains = drains
        self._connections = connections
        self._membership = membership
        self._dispatch = dispatch
        self._versions = versions
        self._commit_phase = commit_phase

    def open(self, options: RoundOptions, connection: Connection | None, now: float) -> int:
        """Open a round with everyone who is free, joiners too: a round carries all weights. Returns its id.

        Raises:
            Conflict: a round is in flight, or the publisher is not connected to the members and has to be.
            FleetUnavailable: too few replicas, or some have not returned since a restart.
        """
        members = self._eligible()
        if options.file_bytes is None:
            self._connections.check(connection, members)
        opened = new_round(
            options,
            self._membership.config,
            round_id=self._versions.new_round_id(),
            version=self._versions.committed_version + 1,
            epoch=self._membership.epoch,
            participants=members,
            connection=connection,
            now=now,
        )
        self._versions.open(opened, now)
        for member in members:
            self._dispatch.withdraw(member, CatchUp, delivered=False)
        return opened.round_id

    def send(self, round_id: int, payload: JsonValue | FilePart, now: float) -> PendingCall:
        """Every participant receives the payload.

        Raises:
            SlipstreamError: the round is not open, or the payload has not one entry for each worker.
        """
        current = self._open_round(round_id)
        parts = split_payload(payload, current.participants)
        current.sent_bytes += payload.size_bytes if isinstance(payload, FilePart) else 0
        bodies: dict[Member, Body] = {
            member: current.receive(parts[member]) for member in current.remaining()
        }
        if current.must_drain and any(member.updates_in_place for member in current.remaining()):
            return self._send_drained(current, parts, now)
        return self._ask(current, Receive.name, bodies, now)

    def _send_drained(
        self, current: Round, parts: Mapping[Member, JsonValue | FilePart], now: float
    ) -> PendingCall:
        """The first payload changes live weights: no request may run by then."""
        call = self._dispatch.expect(
            Receive.name, current.remaining(), on_complete=self._answered, round_id=current.round_id
        )

        def receive(now: float) -> None:
            for member in current.remaining():
                if member in call.waiting:
                    self._dispatch.queue(member, current.receive(parts[member]), now, call)

        self._drain(current, now, receive)
        return call

    def _drain(self, current: Round, now: float, drained: Callable[[float], None]) -> None:
        """Let running requests end; `drained` runs then, unless the round is aborted because they did not."""

        def ended(drain: PendingDrain, now: float) -> None:
            current.not_drained, current.drained = drain.late, True
            if drain.late and current.drain_fallback is DrainFallback.ABORT:
                self.abort(current, not_drained(current), now)
                return
            if drain.late:
                current.in_flight = InFlight.KEEP
            drained(now)

        self._drains.begin(
            drain_of_round(current.round_id),
            current.remaining(),
            now,
            what=f"round {current.round_id}",
            timeout_s=current.drain_timeout_s,
            then=current.drain_fallback.value,
            on_end=ended,
        )

    def close(self, round_id: int, label: str | None, now: float) -> PendingCall:
        """Verify and commit. The call's result is the round's report.

        Raises:
            SlipstreamError: the round is not open.
        """
        current = self._open_round(round_id)
        current.label, current.close = label, PendingCall(name="close_round", round_id=round_id)
        self._versions.enter(RoundPhase.VERIFYING, now)
        bodies = {member: Verify(round_id=round_id) for member in current.remaining()}
        self._ask(current, Verify.name, bodies, now)
        return current.close

    def abort(self, current: Round, error: SlipstreamError, now: float) -> None:
        """The fleet goes on serving the old version. Members that may hold staged bytes drop them."""
        self._versions.abort(error, now)
        for member in current.remaining():
            self._dispatch.withdraw(member, Receive, Verify, delivered=True)
            self.drop(member, current.round_id, now)
        if current.ends_group:
            self._connections.broken(current.connection, current.round_id)
        for call in self._dispatch.pending:
            if call.name == Receive.name and call.round_id == current.round_id:
                call.waiting.clear()  # also what waited for a drain and was never queued
        self._drains.forget(drain_of_round(current.round_id))

    def drop(self, member: Member, round_id: int, now: float) -> None:
        """Have a member discard the staging of a round."""
        if not member.has_queued(Drop):
            bodies = {member: Drop(round_id=round_id)}
            self._dispatch.send_each(Drop.name, bodies, now, on_complete=self._dropped)

    def _dropped(self, call: PendingCall, now: float) -> None:
        """A member that cannot say that its live weights are unchanged is fenced."""
        self._membership.fence_each(classify(call).not_done, Drop.name, now)

    def check_quorum(self, now: float) -> None:
        """Abort a round that lost too many members, or whose members cannot receive the rest."""
        current = self._versions.current
        if current is None or current.decided:
            return
        receiving = self._collective_receive(current)
        if receiving is not None:  # not only when the last has answered: the others wait for the failed one
            self._membership.fence_each(classify(receiving).replica_failed, Receive.name, now)
        remaining, needed = current.remaining(), self._membership.needed
        out = {member.replica_id: member.reason for member in current.participants if member.out}
        if len(remaining) < needed:
            self.abort(current, too_few_remain(current, remaining, needed, out), now)
        elif out and receiving is not None:
            self.abort(current, transfer_failed(current, out), now)

    def decide(self, now: float) -> None:
        """Commit a verified round.

        With `together` no replica may serve the old version without consent, so the decision waits until
        every fence is delivered; meanwhile the fleet serves the old version.
        """
        current = self._versions.current
        if current is None or current.phase not in (RoundPhase.VERIFIED, RoundPhase.DRAINING):
            return
        together = current.commit is CommitMode.TOGETHER
        if together and self._membership.uncertain():
            return
        if not together or not current.must_drain:
            self._commit_phase.decide(current, now)
        elif current.phase is RoundPhase.VERIFIED:
            self._versions.enter(RoundPhase.DRAINING, now)
            self._drain(current, now, lambda now: None)

    def _collective_receive(self, current: Round) -> PendingCall | None:
        """The pending receive over a communicator, which is of no use without one of its members."""
        if current.connection is None or not current.connection.collective:
            return None
        receiving = (
            call
            for call in self._dispatch.pending
            if call.name == Receive.name and call.round_id == current.round_id
        )
        return next(receiving, None)

    def _eligible(self) -> list[Member]:
        current = self._versions.current
        if current is not None:
            raise Conflict(
                f"round {current.round_id} is {current.phase}: close or abort it before opening another",
                {"round_id": current.round_id, "phase": current.phase.value},
            )
        self._membership.check_returned()
        members, needed = self._membership.for_round(), self._membership.needed
        if len(members) < needed:
            raise FleetUnavailable(
                f"a round needs at least {needed} replicas, {len(members)} are registered",
                {"expected": needed, "actual": len(members)},
            )
        return members

    def _open_round(self, round_id: int) -> Round:
        current = self._versions.undecided(round_id)
        if current.phase is not RoundPhase.OPEN:
            raise Conflict(f"round {round_id} is {current.phase}, expected open", {"round_id": round_id})
        return current

    def _ask(self, current: Round, name: str, bodies: Mapping[Member, Body], now: float) -> PendingCall:
        return self._dispatch.send_each(
            name, bodies, now, on_complete=self._answered, round_id=current.round_id
        )

    def _answered(self, call: PendingCall, now: float) -> None:
        current = self._versions.current
        if current is None or current.round_id != call.round_id or current.decided:
            return  # it ended before the last answer came
        current.record(call)
        verdict = classify(call)
        if current.file_bytes is not None and (verdict.rejected or verdict.transfer_failed):
            self._membership.fence_each(verdict.replica_failed, call.name, now)
            refusal = files_refused(current, verdict)
            call.finish(error=refusal)
            self.abort(current, refusal, now)
            return
        self._membership.fence_each(verdict.to_fence, call.name, now)
        missing = {} if current.connection is None else current.connection.missing(call)
        self._membership.count_failed_transfers(verdict, call.name, now, missing)
        if verdict.publisher_at_fault:
            error: SlipstreamError = rejected_by_all(current, call, dict(verdict.rejected))
        elif verdict.transfer_failed:
            error = transfer_failed(current, {**call.absent, **verdict.transfer_failed})
        elif call.name == Verify.name:
            self._compare(current, call, now)
            return
        else:
            return
        call.finish(error=error)  # it is not among the pending calls any more, which the abort ends
        self.abort(current, error, now)

    def _compare(self, current: Round, call: PendingCall, now: float) -> None:
        """Compare the replicas' digests with each other; each has compared its own with the publisher's."""
        staged = {
            member.replica_id: current.staged[member.replica_id]
            for member in current.remaining()
            if member.replica_id in call.answers
        }
        for member in current.remaining():
            member.failed_transfers = 0
        digests = {replica_id: each.digest for replica_id, each in staged.items()}
        minority = digest_minority(digests)
        if minority is None:
            disagreement = join_reasons(digests)
            reason = f"round {current.round_id} aborted: replicas disagree, no majority: {disagreement}"
            self.abort(current, RoundAborted(reason, {"replicas": digests}), now)
            return
        self._membership.fence_each(minority, Verify.name, now)
        current.agree([each for name, each in staged.items() if name not in minority], among=len(staged))
        self._versions.enter(RoundPhase.VERIFIED, now)
