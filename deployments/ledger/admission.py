"""How a replica becomes a member, catches up and is admitted, and the directive for each of its polls.

A joiner serves only the committed version: it receives it in the next round, in which it takes part like the
others, or, if no round comes, loads it from the store. Rounds go on while it loads, so it may be behind again
afterwards: then it waits for a round for as long as it took to load, and each time at least twice as long as
before. So it converges however quick the rounds are, and soon after the last one.

It is paused or put to sleep first if the fleet is. It is admitted between rounds, or during the staging of a
round that it takes part in; never between a round's decision and its end.
"""

from functools import partial

from deployments.ledger.adapters.loading import Adapters
from deployments.ledger.connection import Connections
from deployments.ledger.desired_state import DesiredState
from deployments.ledger.dispatch import Dispatch, Drains
from deployments.ledger.members import Delivered, Member, MemberState, PendingCall, classify
from deployments.ledger.membership import Membership
from deployments.ledger.promises import Promises
from deployments.ledger.rounds.commit_phase import CommitPhase
from deployments.ledger.rounds.staging_phase import StagingPhase
from deployments.ledger.rounds.version_state import VersionState
from deployments.ledger.store_assignment import StoreAssignment
from deployments.protocol.engine_state import equivalent
from deployments.protocol.errors import FleetUnavailable
from deployments.protocol.poll import CatchUp, Directive, JoinAnswer, Report, Unloadable


class Admission:
    """Receives the members' reports and makes their directives."""

    def __init__(
        self,
        membership: Membership,
        dispatch: Dispatch,
        versions: VersionState,
        commit_phase: CommitPhase,
        staging: StagingPhase,
        connections: Connections,
        store_assignment: StoreAssignment,
        desired_state: DesiredState,
        promises: Promises,
        drains: Drains,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._drains = drains
        self._membership = membership
        self._dispatch = dispatch
        self._versions = versions
        self._commit_phase = commit_phase
        self._staging = staging
        self._connections = connections
        self._store_assignment = store_assignment
        self._desired_state = desired_state
        self._promises = promises

    def first_weights(
        self, replica_id: str, incarnation: str, unloadable: Unloadable | None, now: float
    ) -> JoinAnswer:
        """What a starting replica loads: the newest stored version, or, if it cannot, the checkpoint of the
        start. It is behind then, and the next round or the next stored version brings it up to date.

        A question that comes again has the same answer: the replica may be loading what the first one said.
        """
        if unloadable is not None:
            self._promises.refuse(replica_id, incarnation, unloadable.version, unloadable.reason, now)
        made, stored = self._promises.made(incarnation), self._versions.stored
        told = stored if made is None else made
        if told is None or self._promises.refused(incarnation, told.version):
            return JoinAnswer(version=0, path=None)
        self._promises.promise(replica_id, incarnation, told.version, told.path, now)
        return JoinAnswer(
            version=told.version,
            path=told.path,
            fleet_id=self._versions.fleet_id,
            digest=self._versions.digest_of(told.version),
        )

    # -- polls --------------------------------------------------------------------------------

    def on_report(self, report: Report, now: float) -> bool:
        """Register the sender, and take in what it reports.

        Returns:
            Whether something may follow from it. A heartbeat, and an acknowledgement that leaves others
            waiting, make nothing possible: what looks at all members can be left out.

        Raises:
            FleetUnavailable: a later report of the same process has arrived before: this one says what was.
        """
        known = self._member(report)
        if known is not None and report.number < known.last_report:
            raise FleetUnavailable(f"a later report of {report.replica_id} overtook this one")
        quiet = known is not None and _says_nothing_new(known, report)
        epoch = self._membership.epoch
        member = self._membership.register(report, now)
        if member is not None and member.out and report.fenced:
            self._membership.on_fence_delivered(member)
        if member is None or member.out:
            return True
        member.last_poll, member.last_report, member.version = now, report.number, report.version
        member.loading_version = report.loading_version
        member.updates_in_place, member.draining = report.updates_in_place, report.draining
        member.adapters = report.adapters
        self._desired_state.on_report(member, report.condition)
        self._drains.on_report(member)
        self._membership.on_farewell(member, report, now)
        follows = self._store_assignment.on_report(member, report, now)
        if member.state is MemberState.RETURNING:
            self._commit_phase.on_return(member, report, now)
        if self._dispatch.on_acknowledgements(member, report.acknowledgements, now):
            follows = True
            self._dispatch.run_completed(now)
        if report.failed:  # its engine has died, or it failed in an instruction of a controller that has died
            self._membership.fence(member, report.failed, now)
        self._check_version(member, now)
        self._drop_leftovers(member, report, now)
        if report.ended:
            self.gone(member, "it was stopped, and ended before the fleet let it go", now)
        return follows or not quiet or self._membership.epoch != epoch

    def directive(self, report: Report) -> Directive:
        """The answer to a poll; what it carries may arrive. A fence has, once it is confirmed."""
        fence = self._membership.fence_of(report.incarnation)
        acknowledged = tuple(each.seq for each in report.acknowledgements)
        member = self._member(report)
        if member is not None:
            member.delivered = self._deliverable(member)
            for queued in member.queue:
                queued.delivered = True
        return Directive(
            admitted=member is not None and member.state is MemberState.SERVING and not member.leaving,
            instructions=() if member is None else tuple(queued.instruction for queued in member.queue),
            acknowledged=acknowledged,
            fenced=None if fence is None else fence.reason,
            may_leave=member is not None and self._may_leave(member),
            desired=self._membership.size.desired,
        )

    def has_updates(self, report: Report) -> bool:
        """Whether a directive would say anything that the last one to this replica did not."""
        member = self._member(report)
        if member is None or member.out:
            return True
        return member.delivered != self._deliverable(member)

    def _member(self, report: Report) -> Member | None:
        return self._membership.find(report.replica_id, report.incarnation)

    def _deliverable(self, member: Member) -> Delivered:
        queued = member.queue[-1].instruction.seq if member.queue else 0
        delivered = 0 if member.delivered is None else member.delivered.last_seq
        return Delivered(
            state=member.state,
            last_seq=max(queued, delivered),
            may_leave=self._may_leave(member),
            desired=self._membership.size.desired,
        )

    def lost(self, replica_id: str, incarnation: str, reason: str, now: float) -> None:
        """This process is known to be gone; it may have ended before its first poll."""
        member = self._membership.find(replica_id, incarnation)
        if member is None:
            self._promises.lost(replica_id, incarnation, None, now)
        else:
            self.gone(member, reason, now)

    def gone(self, member: Member, reason: str, now: float) -> None:
        """Its process ends, or has ended: in order if nothing waits for it, else it is lost."""
        if member.loading:
            self._promises.lost(member.replica_id, member.incarnation, None, now)
        if self._may_leave(member):
            self._membership.leave(member, now)
        else:
            self._membership.lose(member, reason, now)

    def _may_leave(self, member: Member) -> bool:
        """Nothing waits for it: it goes between rounds, never out of one."""
        if not (member.departing and member.alive) or member.queue:
            return False
        current = self._versions.current
        return current is None or member not in current.participants

    def _check_version(self, member: Member, now: float) -> None:
        """A replica that holds what the fleet did not commit is fenced."""
        committed = self._versions.committed_version
        current = self._versions.current
        swapping = current is not None and current.decided and member in current.commits
        if member.departing:
            return  # it answers nothing any more
        if member.version > committed:
            reason = f"holds version {member.version}, the fleet never went past {committed}"
            self._membership.fence(member, reason, now)
        elif member.state is MemberState.SERVING and member.version != committed and not swapping:
            reason = f"serves version {member.version}, the fleet is at {committed}"
            self._membership.fence(member, reason, now)

    def _drop_leftovers(self, member: Member, report: Report, now: float) -> None:
        """Drop the staging of a round that ended, or that a restarted controller never decided."""
        current = self._versions.current
        known = current is not None and current.round_id == report.staged_round
        if member.alive and report.staged_round is not None and not known:
            self._staging.drop(member, report.staged_round, now)

    # -- progress -----------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Bring joiners to the committed version and the fleet's condition, then admit them; and those who
        serve to its condition, if they missed something when the controller restarted."""
        in_round, condition = self._versions.current is not None, self._desired_state.condition
        for member in self._membership.live():
            if member.state is MemberState.SERVING and member.condition != condition and not in_round:
                self._desired_state.converge(member, now, in_round=False)
            if member.state is not MemberState.JOINING or member.leaving:
                continue
            if member.version != self._versions.committed_version:
                self._catch_up(member, now)
            elif (
                self._admissible(member)
                and self._adapters.converged(member)
                and self._desired_state.converge(member, now, in_round=in_round)
            ):
                self._membership.admit(member, now)

    def _admissible(self, member: Member) -> bool:
        current = self._versions.current
        return current is None or (not current.decided and member in current.participants)

    def _catch_up(self, member: Member, now: float) -> None:
        stored = self._versions.stored
        if self._versions.current is not None or member.loading or member.has_queued(CatchUp):
            return
        if self._versions.idle_s(now) < member.patience_s:
            return
        if stored is None or stored.version != self._versions.committed_version:
            return  # the next round, or the next stored version, brings it up to date
        if self._promises.refused(member.incarnation, stored.version):
            return
        self._promises.promise(member.replica_id, member.incarnation, stored.version, stored.path, now)
        body = CatchUp(
            version=stored.version,
            path=stored.path,
            fleet_id=self._versions.fleet_id,
            digest=self._versions.digest_of(stored.version),
        )
        call = self._dispatch.send_each(
            CatchUp.name, {member: body}, now, on_complete=partial(self._caught_up, sent=now)
        )
        call.result = stored.version

    def _caught_up(self, call: PendingCall, now: float, *, sent: float) -> None:
        """It holds what it was told to load, or could not read it and is as it was, or its weights are
        unknown."""
        verdict = classify(call)
        for replica_id, reason in verdict.rejected.items():
            member = self._membership.get(replica_id)
            if member is not None and not member.out:
                self._promises.refuse(replica_id, member.incarnation, call.result, reason, now)
        reasons = {**verdict.transfer_failed, **verdict.replica_failed}
        for replica_id in verdict.done:
            member = self._membership.get(replica_id)
            if member is None:
                continue
            if call.result != self._versions.committed_version:
                member.patience_s = max(2 * member.patience_s, now - sent)
            if member.version != call.result:
                reasons[replica_id] = f"loaded version {call.result} but holds {member.version}"
        for replica_id in reasons:
            if (member := self._membership.get(replica_id)) is not None:
                self._promises.lost(replica_id, member.incarnation, call.result, now)
        self._membership.fence_each(reasons, CatchUp.name, now)


def _says_nothing_new(member: Member, report: Report) -> bool:
    """Whether a replica that serves says the same as before, but for its acknowledgements and what a round
    changes: its version, what it has staged, and what it retains."""
    return (
        member.state is MemberState.SERVING
        and not (report.leaving or report.ended or report.failed)
        and member.draining == report.draining
        and member.adapters == report.adapters
        and equivalent(member.condition, report.condition)
        and member.loading_version == report.loading_version
        and member.updates_in_place == report.updates_in_place
    )
