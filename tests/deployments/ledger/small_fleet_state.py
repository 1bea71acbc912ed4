"""When two states of a small fleet cannot be told apart from here on.

Replicas have no names in it: what can happen from a state can happen, with other names, from any that differs
in their order alone. Sequence numbers count by their place in a queue, and a process that is gone by nothing.
"""

from typing import Any

from deployments.ledger.decisions import Admitted, Committed, Ended, Opened
from deployments.ledger.state import Member, PendingCall
from deployments.protocol.adapters import AdapterState, LoadAdapter, SetAdapters
from deployments.protocol.poll import Body
from tests.deployments.ledger.small_fleet import Seat, SmallFleet


def key(fleet: SmallFleet) -> Any:
    """Equal for such states."""
    pending, remembered = _pending(fleet), _remembered(fleet)
    seats = [
        (_seat(seat, fleet), _member_of(seat, fleet, pending), remembered(seat.replica.incarnation))
        for seat in fleet.seats
    ]
    return _publisher(fleet), _fleet(fleet, pending), tuple(sorted(seats, key=repr))


def ledger_key(fleet: SmallFleet) -> Any:
    """What a poll may change in the ledger, with the names of the replicas."""
    pending = _pending(fleet)
    return _fleet(fleet, pending), tuple(_member_of(seat, fleet, pending) for seat in fleet.seats)


def says_nothing_new(seat: Seat) -> bool:
    """Whether the answer on its way changes nothing where it arrives."""
    replica, answer = seat.replica, seat.answer
    assert answer is not None
    if replica.fenced is not None:
        return True
    return (
        answer.fenced is None
        and (answer.admitted and not replica.failed) == replica.admitted
        and not set(answer.acknowledged) & set(replica.acknowledgements)
        and all(each.seq in replica.seen for each in answer.instructions)
    )


def _pending(fleet: SmallFleet) -> list[PendingCall]:
    ledger = fleet.ledger
    current = ledger.state.round
    return [*ledger.state.pending, *([] if current is None else current.commits.values())]


def _publisher(fleet: SmallFleet) -> Any:
    call, held, user = fleet.call, fleet.ledger.state.publisher.lease, fleet.user
    return (
        (user.loads, user.step, user.promised, tuple(sorted(user.failed)), user.unloaded),
        None if user.call is None else (user.call.done, user.call.error is None),
        fleet.faults,
        fleet.step,
        fleet.done,
        None if call is None else (call.done, call.error is None),
        held is not None and held.token == fleet.token,
        fleet.ledger.state.publisher.connection is not None,
    )


def _fleet(fleet: SmallFleet, pending: list[PendingCall]) -> Any:
    state = fleet.ledger.state
    current = state.round
    return (
        state.committed_version,
        None if current is None else (current.round_id, current.phase.value, current.close is not None),
        tuple((call.name, call.round_id, call.certain, call.done) for call in pending),
        _adapters(fleet),
        _journal(fleet) if fleet.faults else (),
    )


def _adapters(fleet: SmallFleet) -> Any:
    adapters = fleet.ledger.state.adapters
    loads = [
        (each.adapter.adapter_id, each.stored, each.decided, each.error is None, each.call is not None)
        for each in adapters.loads.values()
    ]
    catalog = [
        tuple(each.adapter_id for each in them) for them in (adapters.catalog.live, adapters.catalog.retired)
    ]
    return adapters.catalog.last_id, *catalog, tuple(loads), len(adapters.unloads), adapters.recovered


def _content(body: Body) -> Any:
    """What an instruction about adapters says."""
    match body:
        case LoadAdapter():
            return body.adapter.adapter_id
        case SetAdapters():
            return tuple(each.adapter_id for each in body.live), tuple(body.keep)
    return None


def _held(state: AdapterState) -> Any:
    return tuple(state.held), tuple(state.live), tuple(state.unloading)


def _journal(fleet: SmallFleet) -> Any:
    """What a restarted controller would know of rounds."""
    rounds = [each for each in fleet.journal if isinstance(each, Opened | Committed | Ended)]
    return tuple(
        (each.kind, each.report.round_id, each.report.phase)
        if isinstance(each, Ended)
        else (each.kind, each.round_id)
        for each in rounds[-3:]
    )


def _remembered(fleet: SmallFleet) -> Any:
    """What it would know of a replica."""
    admitted = {each.member.incarnation for each in fleet.journal if isinstance(each, Admitted)}
    fences = fleet.ledger.state.fences.get

    def remembered(incarnation: str) -> Any:
        fence = fences(incarnation)
        return (incarnation in admitted, None if fence is None else fence.told) if fleet.faults else None

    return remembered


def _seat(seat: Seat, fleet: SmallFleet) -> Any:
    if not seat.alive:
        return ("gone",)
    replica, answer, last = seat.replica, seat.answer, seat.last
    member = fleet.ledger.state.members.get(replica.replica_id)
    place = {} if member is None else _places(member)
    return (
        replica.version,
        replica.staged_round,
        replica.receiving_round,
        replica.verified,
        bool(replica.failed),
        replica.admitted,
        replica.held,
        replica.fenced is not None,
        _held(replica.adapters.state()),
        tuple(
            (place.get(seq, -1), each.outcome.value) for seq, each in sorted(replica.acknowledgements.items())
        ),
        None
        if last is None or not fleet.faults
        else (
            last.version,
            last.staged_round,
            last.fenced,
            len(last.acknowledgements),
            _held(last.adapters),
        ),
        None
        if answer is None
        else (
            answer.admitted,
            answer.fenced is not None,
            bool(set(answer.acknowledged) & set(replica.acknowledgements)),
            tuple(
                (place.get(each.seq, -1), each.body.name, _content(each.body), each.seq in replica.seen)
                for each in answer.instructions
            ),
        ),
    )


def _member_of(seat: Seat, fleet: SmallFleet, pending: list[PendingCall]) -> Any:
    member = fleet.ledger.state.members.get(seat.replica.replica_id)
    if member is None:
        return None
    name, current = member.replica_id, fleet.ledger.state.round
    return (
        member.state.value,
        member.version,
        member.was_serving,
        member.fence_delivered,
        member.failed_transfers,
        tuple((each.body.name, _content(each.body), each.delivered) for each in member.queue),
        _held(member.adapters),
        member.incarnation in fleet.ledger.state.adapters.told_live,
        tuple(
            (member.incarnation in each.asked, name in each.rejected)
            for each in fleet.ledger.state.adapters.loads.values()
        ),
        tuple((member in call.waiting, _outcome(call, name)) for call in pending),
        None
        if current is None
        else (
            member in current.participants,
            member in current.ordered,
            name in current.left_behind,
            name in current.staged,
        ),
    )


def _outcome(call: PendingCall, name: str) -> str:
    answer = call.answers.get(name)
    return "" if answer is None else answer.outcome.value


def _places(member: Member) -> dict[int, int]:
    return {each.instruction.seq: index for index, each in enumerate(member.queue)}
