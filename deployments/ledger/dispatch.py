"""Instructions on their way to members; what waits for acknowledgements, or for running requests to end.

    send_each(bodies) ─► QueuedInstruction in each member's queue ─► directive ─► replica
    on_complete       ◄─ run_completed(), once nobody is waited for ◄─ on_acknowledgements | stop_waiting_for

    Drains.begin ─► DRAIN ─► reports say how many requests still run ─► none, or time is over ─► on_end

A drain that a replica reports and that the ledger does not know (its round was aborted, its caller was
answered, the controller restarted) is ended. Nobody is fenced because its requests take long.

A call's `on_complete` runs from `run_completed`, never from inside the event that completed it, so that
one member's fence cannot re-enter the code that fenced it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployments.ledger.decisions import ID_SPAN, EventLog
from deployments.ledger.limits import LedgerConfig
from deployments.ledger.members import Member, OnComplete, PendingCall, QueuedInstruction, classify
from deployments.protocol.poll import (
    Acknowledgement,
    Body,
    Drain,
    EndDrain,
    Instruction,
    Outcome,
    drain_of_round,
)

if TYPE_CHECKING:
    from deployments.ledger.membership import Membership

UNKNOWN = -1  # a replica that did not say how many requests still run


class Dispatch:
    """The queues of all members, and the pending calls."""

    def __init__(self, config: LedgerConfig) -> None:
        self.config = config
        self._next_seq = 1
        self.pending: list[PendingCall] = []

    def new_id(self, kind: str) -> str:
        """A name that no controller process has given before."""
        self._next_seq += 1
        return f"{kind} {self._next_seq - 1}"

    def start_generation(self, generation: int) -> None:
        """Replicas ignore sequence numbers they have seen: a restarted controller's must be new."""
        self._next_seq = generation * ID_SPAN + 1

    def send_each(
        self,
        name: str,
        bodies: Mapping[Member, Body],
        now: float,
        *,
        on_complete: OnComplete | None = None,
        round_id: int | None = None,
    ) -> PendingCall:
        """Queue one instruction for each member; the call that waits for all of them."""
        call = self.expect(name, bodies, on_complete=on_complete, round_id=round_id)
        for member, body in bodies.items():
            self.queue(member, body, now, call)
        return call

    def expect(
        self,
        name: str,
        members: Iterable[Member],
        *,
        on_complete: OnComplete | None = None,
        round_id: int | None = None,
        certain: bool = False,
        batch: set[Member] | None = None,
    ) -> PendingCall:
        """A call whose instructions are queued later, one by one. `certain`, `batch`: see `PendingCall`."""
        call = PendingCall(
            name=name,
            waiting=set(members),
            on_complete=on_complete,
            certain=certain,
            batch=batch,
            round_id=round_id,
        )
        self.pending.append(call)
        return call

    def queue(self, member: Member, body: Body, now: float, call: PendingCall | None) -> None:
        """Queue an instruction that an existing call waits for, or none."""
        instruction = Instruction(seq=self._next_seq, body=body, deadline_s=self.config.deadline_s(body))
        self._next_seq += 1
        member.queue.append(QueuedInstruction(instruction=instruction, call=call))
        self._start_deadline(member, now)

    def withdraw(self, member: Member, *kinds: type[Body], delivered: bool) -> None:
        """Remove instructions from the queue: only those not delivered yet, or (`delivered`) all.

        One that runs may still be acknowledged, which has no effect.
        """
        for queued in list(member.queue):
            if isinstance(queued.instruction.body, kinds) and (delivered or not queued.delivered):
                member.queue.remove(queued)
                if queued.call is not None:
                    queued.call.stop_waiting_for(member)
                    queued.call.absent[member.replica_id] = "no longer waited for"

    def forget(self, call: PendingCall) -> None:
        """Nobody waits for this call any more."""
        if call in self.pending:
            self.pending.remove(call)

    def on_acknowledgements(
        self, member: Member, acknowledgements: Iterable[Acknowledgement], now: float
    ) -> bool:
        """Complete the member's part of the acknowledged instructions.

        Returns:
            Whether something may follow: one failed, or nobody else is waited for.
        """
        follows = False
        by_seq = {queued.instruction.seq: queued for queued in member.queue}
        for acknowledgement in acknowledgements:
            queued = by_seq.pop(acknowledgement.seq, None)
            if queued is None:
                continue  # repeated, withdrawn, or from before a restart
            member.queue.remove(queued)
            follows = follows or acknowledgement.outcome is not Outcome.DONE
            if queued.call is not None:
                queued.call.answers[member.replica_id] = acknowledgement
                queued.call.stop_waiting_for(member)
                follows = follows or queued.call.leads_on
        self._start_deadline(member, now)
        return follows

    def stop_waiting_for(self, member: Member, *, certain: bool) -> None:
        """The member is out; `certain`: it cannot take a request any more."""
        for call in self.pending:
            if member in call.waiting and (certain or not call.certain):
                call.stop_waiting_for(member)
                call.absent[member.replica_id] = member.reason

    def run_completed(self, now: float) -> bool:
        """Run what follows from the calls that wait for nobody. True if there were any."""
        complete = [call for call in self.pending if not call.waiting]
        self.pending = [call for call in self.pending if call.waiting]
        for call in complete:
            if call.on_complete is not None:
                call.on_complete(call, now)
            call.finish(result=call.result)
        return bool(complete)

    def missed_deadline(self, member: Member, now: float) -> str | None:
        """Why the member is to be fenced for its first instruction; None if it has time left."""
        if not member.queue:
            return None
        first = member.queue[0]
        if first.due is None or now <= first.due:
            return None
        instruction = first.instruction
        return f"missed the deadline of {instruction.body.name} ({instruction.deadline_s:g} s)"

    def _start_deadline(self, member: Member, now: float) -> None:
        if member.queue and member.queue[0].due is None:
            first = member.queue[0]
            first.due = now + first.instruction.deadline_s + self.config.grace_s


@dataclass(slots=True, kw_only=True, eq=False)
class PendingDrain:
    """A drain that is waited for. `late`: requests that still run, by replica id, when its time was over."""

    drain_id: str
    call: PendingCall
    due: float
    late: dict[str, int] = field(default_factory=dict)


OnEnd = Callable[[PendingDrain, float], None]


class Drains:
    """The drains that somebody waits for, or that outlast the wait until their round or call is done."""

    def __init__(self, membership: "Membership", dispatch: Dispatch, events: EventLog) -> None:
        self._events = events
        self._membership = membership
        self._dispatch = dispatch
        self._pending: list[PendingDrain] = []
        self._kept: set[str] = set()  # ids of drains of calls: not ended yet

    def begin(
        self,
        drain_id: str,
        members: Iterable[Member],
        now: float,
        *,
        what: str,
        timeout_s: float,
        then: str,
        on_end: OnEnd,
    ) -> None:
        """Drain the members. `on_end` runs when none of them has a request that runs, or time is over.

        Replicas stay drained until `forget`, or the end of the drain's round.

        Args:
            what: for whom, and `then`: what follows if time is over; for the event.
        """
        members = list(members)

        def ended(call: PendingCall, now: float) -> None:
            if drain not in self._pending:
                return  # forgotten by what ended in the same moment
            self._pending.remove(drain)
            if drain.late:
                self._events.record(
                    "drain_expired", now, what=what, running=dict(drain.late), timeout_s=timeout_s, then=then
                )
            on_end(drain, now)

        call = self._dispatch.expect(Drain.name, members, on_complete=ended)
        drain = PendingDrain(drain_id=drain_id, call=call, due=now + timeout_s)
        self._pending.append(drain)
        self._kept.add(drain_id)
        bodies = {member: Drain(drain_id=drain_id) for member in members}
        self._dispatch.send_each(Drain.name, bodies, now, on_complete=self._begun)

    def forget(self, drain_id: str) -> None:
        """Nobody needs it any more: replicas begin requests again. What waited for it is not called."""
        self._kept.discard(drain_id)
        for drain in [each for each in self._pending if each.drain_id == drain_id]:
            self._pending.remove(drain)
            self._dispatch.forget(drain.call)
        for member in self._membership.all():
            for queued in list(member.queue):
                body = queued.instruction.body
                if isinstance(body, Drain) and body.drain_id == drain_id and not queued.delivered:
                    member.queue.remove(queued)
                    if queued.call is not None:
                        queued.call.stop_waiting_for(member)

    def on_report(self, member: Member) -> None:
        """A member said what it drains, and what still runs."""
        draining = member.draining
        for drain in self._pending:
            if draining is None or drain.drain_id not in draining.drain_ids or draining.running != 0:
                continue
            if member in drain.call.waiting:
                drain.call.waiting.discard(member)
                drain.call.answers[member.replica_id] = Acknowledgement(seq=0, outcome=Outcome.DONE)

    def _expire(self, now: float) -> None:
        for drain in self._pending:
            if now > drain.due:
                drain.late = {member.replica_id: running(member) for member in drain.call.waiting}
                drain.call.waiting.clear()

    def credit(self, stalled_s: float) -> None:
        """No replica could report for so long."""
        for drain in self._pending:
            drain.due += stalled_s

    def advance(self, round_id: int | None, now: float) -> None:
        """End the waits whose time is over, and what replicas drain for nobody.

        Args:
            round_id: of the round in flight.
        """
        self._expire(now)
        known = self._kept if round_id is None else {*self._kept, drain_of_round(round_id)}
        for member in self._membership.live():
            ids = () if member.draining is None else member.draining.drain_ids
            for drain_id in set(ids) - known:
                if not _is_told(member, drain_id):
                    body = EndDrain(drain_id=drain_id)
                    self._dispatch.send_each(EndDrain.name, {member: body}, now, on_complete=self._begun)

    def _begun(self, call: PendingCall, now: float) -> None:
        """A replica whose engine cannot be told is at fault itself."""
        self._membership.fence_each(classify(call).not_done, call.name, now)


def running(member: Member) -> int:
    """Requests that run on a member that drains, as it last said."""
    if member.draining is None or member.draining.running is None:
        return UNKNOWN
    return member.draining.running


def _is_told(member: Member, drain_id: str) -> bool:
    return any(queued.instruction.body == EndDrain(drain_id=drain_id) for queued in member.queue)


def still_running(late: Mapping[str, int]) -> str:
    """Replicas and the requests that still run there, for a sentence."""
    return ", ".join(
        f"{replica_id}: {'did not say how many' if count == UNKNOWN else count}"
        for replica_id, count in sorted(late.items())
    )
