"""When two states of a small fleet cannot be told apart from here on."""

from typing import Any

from deployments.ledger.members import PendingCall
from tests.deployments.ledger.small_fleet import Seat, SmallFleet


def key(fleet: SmallFleet) -> Any:
    """Equal for such states. Sequence numbers count by their order alone."""
    ledger = fleet.ledger
    current = ledger._versions.current
    numbers = sorted(each.instruction.seq for member in ledger._membership.all() for each in member.queue)
    rank = {seq: index for index, seq in enumerate(numbers)}
    return (
        fleet.faults,
        fleet.step,
        fleet.done,
        None if fleet.call is None else (fleet.call.done, fleet.call.error is None),
        ledger.committed_version,
        None if current is None else (current.round_id, current.phase, _ids(current.participants)),
        tuple(_seat(seat, rank) for seat in fleet.seats),
        tuple(_member(member, rank) for member in ledger._membership.all()),
        tuple(
            (call.name, call.round_id, _ids(call.waiting), _outcomes(call))
            for call in ledger._dispatch.pending
        ),
        None
        if current is None
        else tuple((member.replica_id, call.done) for member, call in current.commits.items()),
    )


def _ids(members: Any) -> tuple[str, ...]:
    return tuple(sorted(member.replica_id for member in members))


def _outcomes(call: PendingCall) -> Any:
    return tuple(sorted((name, answer.outcome.value) for name, answer in call.answers.items()))


def _seat(seat: Seat, rank: dict[int, int]) -> Any:
    replica, answer = seat.replica, seat.answer
    last = seat.last
    return (
        seat.alive,
        replica.version,
        replica.staged_round,
        replica.receiving_round,
        replica.verified,
        replica.uncertain,
        replica.admitted,
        replica.held,
        replica.fenced is not None,
        tuple((rank.get(seq, -1), each.outcome) for seq, each in sorted(replica.acknowledgements.items())),
        None if last is None else (last.version, last.staged_round, last.fenced, len(last.acknowledgements)),
        None
        if answer is None
        else (
            answer.admitted,
            answer.fenced is not None,
            tuple(sorted(set(answer.acknowledged) & set(replica.acknowledgements))) != (),
            tuple(
                (rank.get(each.seq, -1), each.body.name, each.seq in replica.seen)
                for each in answer.instructions
            ),
        ),
    )


def _member(member: Any, rank: dict[int, int]) -> Any:
    return (
        member.replica_id,
        member.state,
        member.version,
        member.fence_delivered,
        member.failed_transfers,
        tuple(
            (rank[each.instruction.seq], each.instruction.body.name, each.delivered) for each in member.queue
        ),
    )
