"""Instructions on their way to members, and the calls that wait for their acknowledgements.

    send_each(bodies) ─► QueuedInstruction in each member's queue ─► directive ─► replica
    on_complete       ◄─ run_completed(), once nobody is waited for ◄─ on_acknowledgements | stop_waiting_for

A call's `on_complete` runs from `run_completed`, never from inside the event that completed it, so that
one member's fence cannot re-enter the code that fenced it.
"""

from collections.abc import Iterable, Mapping

from deployments.ledger.event_log import ID_SPAN
from deployments.ledger.limits import LedgerConfig
from deployments.ledger.members import Member, OnComplete, PendingCall, QueuedInstruction
from deployments.protocol.instructions import Body, Instruction
from deployments.protocol.reports import Acknowledgement


class Dispatch:
    """The queues of all members, and the pending calls."""

    def __init__(self, config: LedgerConfig) -> None:
        self._config = config
        self._next_seq = 1
        self.pending: list[PendingCall] = []

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
    ) -> PendingCall:
        """A call whose instructions are queued later, one by one."""
        call = PendingCall(
            name=name, waiting=set(members), on_complete=on_complete, certain=certain, round_id=round_id
        )
        self.pending.append(call)
        return call

    def queue(self, member: Member, body: Body, now: float, call: PendingCall | None) -> None:
        """Queue an instruction that an existing call waits for, or none."""
        instruction = Instruction(seq=self._next_seq, body=body, deadline_s=self._config.deadline_s(body))
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
                    queued.call.waiting.discard(member)
                    queued.call.absent[member.replica_id] = "no longer waited for"

    def on_acknowledgements(
        self, member: Member, acknowledgements: Iterable[Acknowledgement], now: float
    ) -> None:
        """Complete the member's part of the acknowledged instructions."""
        by_seq = {queued.instruction.seq: queued for queued in member.queue}
        for acknowledgement in acknowledgements:
            queued = by_seq.pop(acknowledgement.seq, None)
            if queued is None:
                continue  # repeated, withdrawn, or from before a restart
            member.queue.remove(queued)
            if queued.call is not None:
                queued.call.answers[member.replica_id] = acknowledgement
                queued.call.waiting.discard(member)
        self._start_deadline(member, now)

    def stop_waiting_for(self, member: Member, *, certain: bool) -> None:
        """The member is out; `certain`: it cannot take a request any more."""
        for call in self.pending:
            if member in call.waiting and (certain or not call.certain):
                call.waiting.discard(member)
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
            first.due = now + first.instruction.deadline_s + self._config.grace_s
