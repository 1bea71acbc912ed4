"""The members of the fleet and the errands they run: who is in, who is out, who still has to answer.

    ask(members) ─► Order in each member's queue ─► directive ─► replica
    Task.then    ◄─ settle(), once none is waited for ◄─ hear(acknowledgements) | fence | lose

Nothing here knows what a round is. A task's `then` runs from `settle`, never from inside the call
that completed it, so that one member's fence cannot re-enter the judgement that fenced it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deployments.ledger.decisions import KEPT_FENCES, Admitted, Decision, EpochChanged, Fenced, Participant
from deployments.ledger.event_log import ID_SPAN, EventLog
from deployments.ledger.limits import LedgerConfig
from deployments.ledger.members import Member, MemberState, Order, Task, Then
from deployments.protocol import Acknowledgement, Instruction, InstructionKind, Report


class Fleet:
    def __init__(self, config: LedgerConfig, events: EventLog) -> None:
        self.config = config
        self.events = events
        self.members: dict[str, Member] = {}  # by replica id, in order of registration
        self.fences: OrderedDict[str, Fenced] = OrderedDict()  # by incarnation; never forgiven
        self.epoch = 0
        self.decisions: list[Decision] = []
        self.tasks: list[Task] = []  # those that still wait for a member
        self._next_seq = 1

    def start_generation(self, generation: int) -> None:
        """Replicas ignore sequence numbers they have seen: a restarted controller's must be new."""
        self._next_seq = generation * ID_SPAN + 1
        self.events.start_generation(generation)

    def live(self) -> list[Member]:
        return [member for member in self.members.values() if member.alive]

    def uncertain(self) -> list[Member]:
        """Those that may take requests without the ledger's consent: fenced but not told, or not heard
        of since a restart."""
        return [
            member
            for member in self.members.values()
            if member.state is MemberState.RETURNING
            or (member.state is MemberState.FENCED and not member.fence_told)
        ]

    def serving(self) -> list[Member]:
        return [member for member in self.members.values() if member.state is MemberState.SERVING]

    # -- membership ---------------------------------------------------------------------------

    def register(self, report: Report, now: float) -> Member | None:
        """The member that sent this report; None if its incarnation is fenced and gone."""
        member = self.members.get(report.replica_id)
        if member is not None and member.incarnation == report.incarnation:
            return member
        if report.incarnation in self.fences:
            return None
        if member is not None:
            self.lose(member, f"replaced by incarnation {report.incarnation}", now)
        joiner = Member(
            replica_id=report.replica_id,
            incarnation=report.incarnation,
            world_size=report.world_size,
            version=report.version,
            state=MemberState.JOINING,
            seen=now,
        )
        self.members[joiner.replica_id] = joiner
        self.events.record("register", now, replica=joiner.replica_id, version=joiner.version)
        return joiner

    def returning(
        self, participant: Participant, *, version: int, was_serving: bool, now: float
    ) -> Member | None:
        """A member of before a restart, waited for; None if it is certain never to serve again. One that
        was fenced meanwhile may not have been told, and is waited for all the same."""
        fence = self.fences.get(participant.incarnation)
        if fence is not None and fence.told:
            return None
        return self.members.setdefault(
            participant.replica_id,
            Member(
                replica_id=participant.replica_id,
                incarnation=participant.incarnation,
                world_size=participant.world_size,
                version=version,
                was_serving=was_serving,
                state=MemberState.RETURNING if fence is None else MemberState.FENCED,
                reason="" if fence is None else fence.reason,
                seen=now,
            ),
        )

    def admit(self, member: Member, now: float) -> None:
        member.state = MemberState.SERVING
        participant = Participant(
            replica_id=member.replica_id, incarnation=member.incarnation, world_size=member.world_size
        )
        self.decisions.append(Admitted(member=participant))
        self._change_epoch()
        self.events.record("admit", now, replica=member.replica_id, version=member.version, epoch=self.epoch)

    def fence(self, member: Member, reason: str, now: float) -> None:
        """Out of routing at once and for good. Those who need to be certain wait until it was told."""
        if member.out:
            return
        self._forbid(member, reason)
        self.events.record("fence", now, replica=member.replica_id, reason=reason, epoch=self.epoch)

    def lose(self, member: Member, reason: str, now: float) -> None:
        """Its process is gone, or has been silent for so long that it stopped serving by itself."""
        if member.state is MemberState.LOST:
            return
        if not member.out:
            self._forbid(member, reason)
        self.told_fence(member)
        member.state = MemberState.LOST
        del self.members[member.replica_id]
        self.events.record("lost", now, replica=member.replica_id, reason=reason, epoch=self.epoch)

    def fence_each(self, reasons: Mapping[str, str], doing: str, now: float) -> None:
        """`reasons` by replica id; those that are gone already are left out."""
        for replica_id, reason in reasons.items():
            member = self.members.get(replica_id)
            if member is not None:
                self.fence(member, f"{doing}: {reason}", now)

    def told_fence(self, member: Member) -> None:
        if not member.fence_told:
            member.fence_told = True
            self._decide_fence(member)
        self._stop_waiting_for(member, certain=True)

    def _forbid(self, member: Member, reason: str) -> None:
        member.state, member.reason = MemberState.FENCED, reason
        member.orders.clear()
        self._decide_fence(member)
        self._change_epoch()
        self._stop_waiting_for(member, certain=False)

    def _decide_fence(self, member: Member) -> None:
        fence = Fenced(
            replica_id=member.replica_id,
            incarnation=member.incarnation,
            reason=member.reason,
            told=member.fence_told,
        )
        self.decisions.append(fence)
        self.fences[member.incarnation] = fence
        while len(self.fences) > KEPT_FENCES:
            self.fences.popitem(last=False)

    def _change_epoch(self) -> None:
        self.epoch += 1
        self.decisions.append(EpochChanged(epoch=self.epoch))

    def _stop_waiting_for(self, member: Member, certain: bool) -> None:
        for task in self.tasks:
            if member in task.waiting and (certain or not task.certain):
                task.waiting.discard(member)
                task.absent[member.replica_id] = member.reason

    # -- errands ------------------------------------------------------------------------------

    def ask(
        self,
        kind: InstructionKind,
        args: Mapping[str, Mapping[str, Any]],
        now: float,
        *,
        then: Then | None = None,
        round_id: int | None = None,
        certain: bool = False,
    ) -> Task:
        """One instruction to each member named in `args` (by replica id); the task of them all."""
        members = [self.members[replica_id] for replica_id in args]
        task = self.expect(kind, members, then=then, round_id=round_id, certain=certain)
        for member in members:
            self.order(member, kind, args[member.replica_id], now, task)
        return task

    def expect(
        self,
        kind: InstructionKind,
        members: Iterable[Member],
        *,
        then: Then | None = None,
        round_id: int | None = None,
        certain: bool = False,
    ) -> Task:
        """A task whose instructions are ordered later, one by one."""
        task = Task(kind=kind.value, waiting=set(members), then=then, certain=certain, round_id=round_id)
        self.tasks.append(task)
        return task

    def order(
        self, member: Member, kind: InstructionKind, args: Mapping[str, Any], now: float, task: Task | None
    ) -> None:
        deadline_s = self.config.deadline_s(kind)
        instruction = Instruction(seq=self._next_seq, kind=kind, args=dict(args), deadline_s=deadline_s)
        self._next_seq += 1
        member.orders.append(Order(instruction=instruction, task=task))
        self._start_clock(member, now)

    def withdraw(self, member: Member, kinds: Sequence[InstructionKind], *, sent: bool) -> None:
        """Take instructions back: those not sent yet, or (`sent`) all. A running one may still be
        acknowledged, which nobody hears."""
        for order in list(member.orders):
            if order.instruction.kind in kinds and (sent or not order.delivered):
                member.orders.remove(order)
                if order.task is not None:
                    order.task.waiting.discard(member)
                    order.task.absent[member.replica_id] = "no longer waited for"

    def hear(self, member: Member, acknowledgements: Iterable[Acknowledgement], now: float) -> None:
        by_seq = {order.instruction.seq: order for order in member.orders}
        for acknowledgement in acknowledgements:
            order = by_seq.pop(acknowledgement.seq, None)
            if order is None:
                continue  # heard before, withdrawn, or from before a restart
            member.orders.remove(order)
            if order.task is not None:
                order.task.answers[member.replica_id] = acknowledgement
                order.task.waiting.discard(member)
        self._start_clock(member, now)

    def settle(self, now: float) -> bool:
        """Run what follows from the tasks that nobody is waited for any more. True if there were any."""
        ready = [task for task in self.tasks if not task.waiting]
        self.tasks = [task for task in self.tasks if task.waiting]
        for task in ready:
            if task.then is not None:
                task.then(task, now)
            task.finish(result=task.result)
        return bool(ready)

    def check_deadlines(self, now: float) -> None:
        for member in list(self.members.values()):
            self._check_deadline(member, now)
            silent_s = now - member.seen
            if silent_s > self.config.heartbeat_timeout_s:
                self.lose(member, f"silent for {silent_s:.1f} s", now)

    def _check_deadline(self, member: Member, now: float) -> None:
        if not member.orders:
            return
        order = member.orders[0]
        if order.due is not None and now > order.due:
            kind, deadline_s = order.instruction.kind.value, order.instruction.deadline_s
            self.fence(member, f"missed the deadline of {kind} ({deadline_s:g} s)", now)

    def _start_clock(self, member: Member, now: float) -> None:
        if member.orders and member.orders[0].due is None:
            first = member.orders[0]
            first.due = now + first.instruction.deadline_s + self.config.grace_s
