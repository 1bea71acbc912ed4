"""Who is a member: registered, admitted, fenced, lost. Each join or loss makes a new epoch."""

from collections import OrderedDict
from collections.abc import Mapping

from deployments.ledger.decisions import (
    KEPT_FENCES,
    Admitted,
    DecisionLog,
    EpochChanged,
    EventLog,
    Fenced,
    Participant,
)
from deployments.ledger.dispatch import Dispatch
from deployments.ledger.limits import FleetSize, LedgerConfig, SizeLimits
from deployments.ledger.members import Member, MemberState, Verdict
from deployments.protocol.errors import FleetUnavailable
from deployments.protocol.poll import Report

MAX_FAILED_TRANSFERS = 3


class Membership:
    """The members of the fleet, the epoch, and the incarnations that are fenced for good."""

    def __init__(
        self,
        config: LedgerConfig,
        decisions: DecisionLog,
        events: EventLog,
        dispatch: Dispatch,
        size: SizeLimits,
    ) -> None:
        self.config = config
        self.size = FleetSize(size, decisions, events)
        self._decisions = decisions
        self._events = events
        self._dispatch = dispatch
        self._members: dict[str, Member] = {}  # by replica id, in order of registration
        self._fences: OrderedDict[str, Fenced] = OrderedDict()  # by incarnation; never lifted
        self._epoch = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    def recover_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def recover_fence(self, fence: Fenced) -> None:
        self._fences[fence.incarnation] = fence

    def __len__(self) -> int:
        return len(self._members)

    def all(self) -> list[Member]:
        return list(self._members.values())

    def get(self, replica_id: str) -> Member | None:
        return self._members.get(replica_id)

    def find(self, replica_id: str, incarnation: str) -> Member | None:
        """The member with this id, if it is this very process."""
        member = self._members.get(replica_id)
        return member if member is not None and member.incarnation == incarnation else None

    def fence_of(self, incarnation: str) -> Fenced | None:
        return self._fences.get(incarnation)

    @property
    def needed(self) -> int:
        """Participants that a round needs."""
        return self.size.needed(self.config.min_replicas)

    def live(self) -> list[Member]:
        return [member for member in self._members.values() if member.alive and not member.departing]

    def for_round(self) -> list[Member]:
        """Those that a round, or a connection for it, is made with.

        One that loads a stored version would keep the others waiting. It is left out if enough others are
        there, and takes part in a later round.
        """
        ready = [member for member in self.live() if not member.loading]
        return ready if len(ready) >= self.needed else self.live()

    def serving(self) -> list[Member]:
        return [each for each in self.live() if each.state is MemberState.SERVING]

    def returning(self) -> list[Member]:
        """Those that served before a restart and have not polled since."""
        return [member for member in self._members.values() if member.state is MemberState.RETURNING]

    def uncertain(self) -> list[Member]:
        """Those that may take requests without the ledger's consent.

        They are fenced but the fence is not delivered, or silent since a restart.
        """
        undelivered = [
            member
            for member in self._members.values()
            if member.state is MemberState.FENCED and not member.fence_delivered
        ]
        return [*self.returning(), *undelivered]

    def silent_since(self, before: float) -> list[tuple[str, str]]:
        """(replica id, incarnation) of those that have not polled since `before`."""
        members = self._members.values()
        return [(each.replica_id, each.incarnation) for each in members if each.last_poll < before]

    # -- in -----------------------------------------------------------------------------------

    def register(self, report: Report, now: float) -> Member | None:
        """The member that sent this report; None if its incarnation is fenced and gone."""
        member = self._members.get(report.replica_id)
        if member is not None and member.incarnation == report.incarnation:
            return member
        if report.incarnation in self._fences:
            return None
        if member is not None:
            self.lose(member, f"replaced by incarnation {report.incarnation}", now)
        joiner = Member(
            replica_id=report.replica_id,
            incarnation=report.incarnation,
            world_size=report.world_size,
            version=report.version,
            state=MemberState.JOINING,
            last_poll=now,
        )
        self._members[joiner.replica_id] = joiner
        self._events.record("register", now, replica=joiner.replica_id, version=joiner.version)
        return joiner

    def recover_member(
        self, participant: Participant, *, version: int, was_serving: bool, now: float
    ) -> Member | None:
        """A member from before a restart, waited for; None if it is certain never to serve again.

        A fenced one whose fence may not have been delivered is waited for as well.
        """
        fence = self._fences.get(participant.incarnation)
        if fence is not None and fence.told:
            return None
        return self._members.setdefault(
            participant.replica_id,
            Member(
                replica_id=participant.replica_id,
                incarnation=participant.incarnation,
                world_size=participant.world_size,
                version=version,
                was_serving=was_serving,
                state=MemberState.RETURNING if fence is None else MemberState.FENCED,
                reason="" if fence is None else fence.reason,
                last_poll=now,
            ),
        )

    def admit(self, member: Member, now: float) -> None:
        """Let it take requests."""
        member.state = MemberState.SERVING
        participant = Participant(
            replica_id=member.replica_id, incarnation=member.incarnation, world_size=member.world_size
        )
        self._decisions.append(Admitted(member=participant))
        self._change_epoch()
        self._events.record(
            "admit", now, replica=member.replica_id, version=member.version, epoch=self._epoch
        )

    # -- out ----------------------------------------------------------------------------------

    def fence(self, member: Member, reason: str, now: float) -> None:
        """Take it out of routing, for good. Calls that need certainty wait until the fence is delivered."""
        if member.out:
            return
        self._forbid(member, reason)
        self._events.record("fence", now, replica=member.replica_id, reason=reason, epoch=self._epoch)

    def fence_each(self, reasons: Mapping[str, str], action: str, now: float) -> None:
        """`reasons` by replica id; those that are gone already are left out."""
        for replica_id, reason in reasons.items():
            member = self._members.get(replica_id)
            if member is not None:
                self.fence(member, f"{action}: {reason}", now)

    def lose(self, member: Member, reason: str, now: float) -> None:
        """Its process is gone, or has been silent for so long that it stopped serving by itself."""
        if member.state is MemberState.LOST:
            return
        if not member.out:
            self._forbid(member, reason)
        self.on_fence_delivered(member)
        member.state = MemberState.LOST
        del self._members[member.replica_id]
        self._events.record("lost", now, replica=member.replica_id, reason=reason, epoch=self._epoch)

    def on_farewell(self, member: Member, report: Report, now: float) -> None:
        """Whether it is being stopped in order, and how far that is."""
        if report.leaving and not member.leaving:
            self._events.record("leaving", now, replica=member.replica_id, version=member.version)
        member.leaving, member.drained = report.leaving, report.drained

    def leave(self, member: Member, now: float) -> None:
        """It ended in order: no request is running on it, and nothing waits for it."""
        member.state, member.reason = MemberState.LOST, "it left in order"
        member.fence_delivered = True
        member.queue.clear()
        self._decide_fence(member)  # so that a successor does not wait for it
        self._change_epoch()
        self._dispatch.stop_waiting_for(member, certain=True)
        del self._members[member.replica_id]
        self._events.record("left", now, replica=member.replica_id, epoch=self._epoch)

    def on_fence_delivered(self, member: Member) -> None:
        """It knows that it is fenced, or is gone: it takes no request any more."""
        if not member.fence_delivered:
            member.fence_delivered = True
            self._decide_fence(member)
        self._dispatch.stop_waiting_for(member, certain=True)

    def check_deadlines(self, now: float) -> list[str]:
        """Fence members that missed a deadline, and lose silent ones; returns the ids of those."""
        silent = []
        for member in self.all():
            if (reason := self._dispatch.missed_deadline(member, now)) is not None:
                self.fence(member, reason, now)
            silent_s = now - member.last_poll
            if silent_s > self.config.heartbeat_timeout_s:
                self.lose(member, f"silent for {silent_s:.1f} s", now)
                silent.append(member.replica_id)
        return silent

    def credit(self, stalled_s: float) -> None:
        """Nobody could poll for so long."""
        for member in self.all():
            member.last_poll += stalled_s
            for queued in member.queue:
                if queued.due is not None:
                    queued.due += stalled_s

    def check_returned(self) -> None:
        """After a restart: a round without the replicas that still serve would leave them behind.

        Raises:
            FleetUnavailable: some have not returned.
        """
        absent = [member.replica_id for member in self.returning()]
        if absent:
            raise FleetUnavailable(
                f"the controller restarted and replicas {absent} have not polled yet; try again",
                {"replicas": absent},
            )

    def count_failed_transfers(
        self, verdict: Verdict, action: str, now: float, missing: Mapping[str, str]
    ) -> None:
        """Fence a member whose transfers go on failing while others receive: the fault is its own.

        A transfer that failed everywhere says nothing about anybody, except about those that did not answer
        their peers.

        Args:
            missing: these replicas, by id, and how it was seen.
        """
        failed = verdict.transfer_failed if verdict.done else missing
        for replica_id, reason in failed.items():
            member = self._members.get(replica_id)
            if member is None or member.out:
                continue
            member.failed_transfers += 1
            if member.failed_transfers >= MAX_FAILED_TRANSFERS:
                fault = "while others received" if verdict.done else "and did not answer its peers"
                times = f"failed {member.failed_transfers} times in a row {fault}"
                self.fence(member, f"{action}: {times}: {reason}", now)

    def _forbid(self, member: Member, reason: str) -> None:
        member.state, member.reason = MemberState.FENCED, reason
        member.queue.clear()
        self._decide_fence(member)
        self._change_epoch()
        self._dispatch.stop_waiting_for(member, certain=False)

    def _decide_fence(self, member: Member) -> None:
        fence = Fenced(
            replica_id=member.replica_id,
            incarnation=member.incarnation,
            reason=member.reason,
            told=member.fence_delivered,
        )
        self._decisions.append(fence)
        self._fences[member.incarnation] = fence
        while len(self._fences) > KEPT_FENCES:
            self._fences.popitem(last=False)

    def _change_epoch(self) -> None:
        self._epoch += 1
        self._decisions.append(EpochChanged(epoch=self._epoch))
