"""Members, and the instructions on their way to them.

    send(bodies) ─► each member's queue ─► directive ─► replica
    on_complete  ◄─ run_completed(), once every member has answered or is out

    begin_drain ─► DRAIN ─► reports say how many requests still run ─► none, or timeout ─► on_end

`on_complete` runs from `run_completed`, never inside the completing event: one member's fence cannot re-enter
the code that fenced it.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from deployments.ledger.decisions import KEPT_FENCES, Admitted, Fenced, Participant
from deployments.ledger.state import (
    UNKNOWN,
    Member,
    MemberState,
    OnComplete,
    PendingCall,
    PendingDrain,
    QueuedInstruction,
    State,
    classify,
)
from deployments.protocol import poll

MAX_FAILED_TRANSFERS = 3


def send(
    state: State,
    name: str,
    bodies: Mapping[Member, poll.Body],
    *,
    on_complete: OnComplete | None = None,
    round_id: int | None = None,
) -> PendingCall:
    call = PendingCall(name=name, waiting=set(bodies), on_complete=on_complete, round_id=round_id)
    state.pending.append(call)
    for member, body in bodies.items():
        queue(state, member, body, call)
    return call


def send_or_fence(state: State, member: Member, body: poll.Body) -> None:
    send(state, body.name, {member: body}, on_complete=_fence_not_done)


def _fence_not_done(state: State, call: PendingCall) -> None:
    fence_each(state, classify(call).not_done, call.name)


def queue(state: State, member: Member, body: poll.Body, call: PendingCall | None = None) -> None:
    config = state.config
    match body:  # how long a replica may take over it, from the end of the one before it
        case poll.Commit() | poll.Release():
            deadline_s = config.commit_timeout_s
        case poll.CatchUp():
            deadline_s = config.catch_up_timeout_s
        case poll.Connect() | poll.Receive() | poll.Verify() | poll.Drop():
            deadline_s = config.stage_timeout_s
        case _:
            deadline_s = config.call_timeout_s
    instruction = poll.Instruction(seq=state.next_seq, body=body, deadline_s=deadline_s)
    state.next_seq += 1
    member.queue.append(QueuedInstruction(instruction=instruction, call=call))
    _start_deadline(state, member)


def withdraw(member: Member, matches: Callable[[poll.Body], bool], *, delivered: bool) -> bool:
    """Returns whether a delivered matching instruction remains; `delivered` removes those too."""
    remains = False
    for queued in [each for each in member.queue if matches(each.body)]:
        if queued.delivered and not delivered:
            remains = True
            continue
        member.queue.remove(queued)
        if queued.call is not None:
            queued.call.stop_waiting_for(member)
            queued.call.absent[member.replica_id] = "no longer waited for"
    return remains


def forget(state: State, call: PendingCall) -> None:
    if call in state.pending:
        state.pending.remove(call)


def on_acknowledgements(
    state: State, member: Member, acknowledgements: Iterable[poll.Acknowledgement]
) -> bool:
    """Returns whether an instruction failed, or no other member is waited for."""
    follows = False
    by_seq = {queued.instruction.seq: queued for queued in member.queue}
    for acknowledgement in acknowledgements:
        queued = by_seq.pop(acknowledgement.seq, None)
        if queued is None:
            continue
        member.queue.remove(queued)
        follows = follows or acknowledgement.outcome is not poll.Outcome.DONE
        call = queued.call
        if call is not None:
            call.answers[member.replica_id] = acknowledgement
            call.stop_waiting_for(member)
            follows = follows or not (call.waiting or call.batch)
    _start_deadline(state, member)
    return follows


def run_completed(state: State) -> bool:
    complete = [call for call in state.pending if not call.waiting]
    state.pending = [call for call in state.pending if call.waiting]
    for call in complete:
        if call.on_complete is not None:
            call.on_complete(state, call)
        call.finish()
    return bool(complete)


def _stop_waiting_for(state: State, member: Member, *, certain: bool) -> None:
    for call in state.pending:
        if member in call.waiting and (certain or not call.certain):
            call.stop_waiting_for(member)
            call.absent[member.replica_id] = member.reason


def _start_deadline(state: State, member: Member) -> None:
    if member.queue and member.queue[0].due == math.inf:
        first = member.queue[0]
        first.due = state.now + first.instruction.deadline_s + state.config.grace_s


def register(state: State, report: poll.Report) -> Member | None:
    member = state.members.get(report.replica_id)
    if member is not None and member.incarnation == report.incarnation:
        return member
    if report.incarnation in state.fences:
        return None
    if member is not None:
        lose(state, member, f"replaced by incarnation {report.incarnation}")
    joiner = Member(
        replica_id=report.replica_id,
        incarnation=report.incarnation,
        world_size=report.world_size,
        version=report.version,
        state=MemberState.JOINING,
        last_poll=state.now,
    )
    state.members[joiner.replica_id] = joiner
    state.record("register", replica=joiner.replica_id, version=joiner.version)
    return joiner


def recover_member(
    state: State, participant: Participant, *, version: int, was_serving: bool
) -> Member | None:
    """Wait for a member from before a restart; None if it can never serve again."""
    fenced = state.fences.get(participant.incarnation)
    if fenced is not None and fenced.told:
        return None
    return state.members.setdefault(
        participant.replica_id,
        Member(
            replica_id=participant.replica_id,
            incarnation=participant.incarnation,
            world_size=participant.world_size,
            version=version,
            was_serving=was_serving,
            state=MemberState.RETURNING if fenced is None else MemberState.FENCED,
            reason="" if fenced is None else fenced.reason,
            last_poll=state.now,
        ),
    )


def admit(state: State, member: Member) -> None:
    member.state = MemberState.SERVING
    state.epoch += 1
    state.decide(Admitted(member=member.participant, epoch=state.epoch))
    state.record("admit", replica=member.replica_id, version=member.version, epoch=state.epoch)


def fence(state: State, member: Member, reason: str) -> None:
    if not member.out:
        _forbid(state, member, reason)
        state.record("fence", replica=member.replica_id, reason=reason, epoch=state.epoch)


def fence_each(state: State, reasons: Mapping[str, str], action: str) -> None:
    for replica_id, reason in reasons.items():
        if (member := state.members.get(replica_id)) is not None:
            fence(state, member, f"{action}: {reason}")


def lose(state: State, member: Member, reason: str) -> None:
    if not member.out:
        _forbid(state, member, reason)
    on_fence_delivered(state, member)
    member.state = MemberState.LOST
    del state.members[member.replica_id]
    state.record("lost", replica=member.replica_id, reason=reason, epoch=state.epoch)


def leave(state: State, member: Member) -> None:
    member.state, member.reason = MemberState.LOST, "it left in order"
    member.fence_delivered = True
    state.epoch += 1
    _decide_fence(state, member)  # a successor must not wait for it
    _stop_waiting_for(state, member, certain=True)
    del state.members[member.replica_id]
    state.record("left", replica=member.replica_id, epoch=state.epoch)


def on_fence_delivered(state: State, member: Member) -> None:
    if not member.fence_delivered:
        member.fence_delivered = True
        _decide_fence(state, member)
    _stop_waiting_for(state, member, certain=True)


def check_deadlines(state: State) -> list[str]:
    silent = []
    for member in list(state.members.values()):
        if member.queue:
            first = member.queue[0]
            if state.now > first.due:
                limit_s = first.instruction.deadline_s
                fence(state, member, f"missed the deadline of {first.body.name} ({limit_s:g} s)")
        silent_s = state.now - member.last_poll
        if silent_s > state.config.heartbeat_timeout_s:
            lose(state, member, f"silent for {silent_s:.1f} s")
            silent.append(member.replica_id)
    return silent


def count_failed_transfers(state: State, call: PendingCall, missing: Mapping[str, str]) -> None:
    verdict = classify(call)
    failed = verdict.transfer_failed if verdict.done else missing
    for replica_id, reason in failed.items():
        member = state.members.get(replica_id)
        if member is None:
            continue
        member.failed_transfers += 1
        if member.failed_transfers >= MAX_FAILED_TRANSFERS:
            fault = "while others received" if verdict.done else "and did not answer its peers"
            times = f"failed {member.failed_transfers} times in a row {fault}"
            fence(state, member, f"{call.name}: {times}: {reason}")


def _forbid(state: State, member: Member, reason: str) -> None:
    member.state, member.reason = MemberState.FENCED, reason
    member.queue.clear()
    state.epoch += 1
    _decide_fence(state, member)
    _stop_waiting_for(state, member, certain=False)


def _decide_fence(state: State, member: Member) -> None:
    fenced = Fenced(
        replica_id=member.replica_id,
        incarnation=member.incarnation,
        reason=member.reason,
        epoch=state.epoch,
        told=member.fence_delivered,
    )
    state.decide(fenced)
    state.fences[member.incarnation] = fenced
    while len(state.fences) > KEPT_FENCES:
        state.fences.popitem(last=False)


def begin_drain(
    state: State,
    drain_id: str,
    members: Iterable[Member],
    *,
    what: str,
    then: str,
    on_end: Callable[[PendingDrain], None],
) -> None:
    """Drain until `forget_drain`. `on_end` runs when no request runs, or at the timeout: no replica is fenced
    for long requests. `what`, `then`: for the event of a timeout."""
    members, timeout_s = list(members), state.config.drain_timeout_s

    def ended(state: State, call: PendingCall) -> None:
        if drain not in state.drains:
            return
        if drain.late:
            state.record("drain_expired", what=what, running=dict(drain.late), timeout_s=timeout_s, then=then)
        on_end(drain)

    call = PendingCall(name=poll.Drain.name, waiting=set(members), on_complete=ended)
    state.pending.append(call)
    drain = PendingDrain(drain_id=drain_id, call=call, due=state.now + timeout_s)
    state.drains.append(drain)
    bodies = {member: poll.Drain(drain_id=drain_id) for member in members}
    send(state, poll.Drain.name, bodies, on_complete=_fence_not_done)


def forget_drain(state: State, drain_id: str) -> None:
    """Requests begin again; `on_end` does not run."""
    for drain in [each for each in state.drains if each.drain_id == drain_id]:
        state.drains.remove(drain)
        forget(state, drain.call)
    for member in state.members.values():
        withdraw(member, lambda body: body == poll.Drain(drain_id=drain_id), delivered=False)


def on_draining(state: State, member: Member) -> None:
    draining = member.draining
    for drain in state.drains:
        if draining is not None and drain.drain_id in draining.drain_ids and draining.running == 0:
            drain.call.waiting.discard(member)


def end_drains(state: State) -> None:
    for drain in state.drains:
        if state.now > drain.due:
            drain.late = {member.replica_id: _running(member) for member in drain.call.waiting}
            drain.call.waiting.clear()
    known = {
        *(drain.drain_id for drain in state.drains),
        *([] if state.round is None else [poll.drain_of_round(state.round.round_id)]),
    }
    for member in state.live():
        for drain_id in () if member.draining is None else set(member.draining.drain_ids) - known:
            body = poll.EndDrain(drain_id=drain_id)
            if not any(queued.body == body for queued in member.queue):
                send_or_fence(state, member, body)


def _running(member: Member) -> int:
    if member.draining is None or member.draining.running is None:
        return UNKNOWN
    return member.draining.running


def still_running(late: Mapping[str, int]) -> str:
    return ", ".join(
        f"{replica_id}: {'did not say how many' if count == UNKNOWN else count}"
        for replica_id, count in sorted(late.items())
    )
