"""The publisher: its lease with a fencing token, and its connection to the fleet.

A collective connection is valid for exactly its members. Any other reaches each replica separately: a joiner
gets it too, even one that then loads a stored version.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from pydantic import JsonValue

from deployments.ledger import membership
from deployments.ledger.decisions import LeaseIssued
from deployments.ledger.state import Connection, Member, PendingCall, State, classify, join_reasons
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, StalePublisher
from deployments.protocol.poll import Connect, Drop
from deployments.protocol.publishing import Lease


def acquire(state: State, publisher: str) -> Lease:
    """Also to its holder, whose old token becomes stale. Raises Conflict."""
    desk = state.publisher
    if desk.lease is not None and desk.lease.publisher != publisher and not gives_way(state):
        left_s = round(desk.expires - state.now, 1)
        raise Conflict(
            f"{desk.lease.publisher!r} publishes; its lease ends in {left_s} s unless it is renewed",
            {"holder": desk.lease.publisher, "remaining_s": left_s},
        )
    desk.last_token += 1
    duration_s = state.config.lease_s
    desk.lease = Lease(publisher=publisher, token=desk.last_token, duration_s=duration_s)
    desk.shared = False
    desk.expires = state.now + duration_s
    state.decide(LeaseIssued(token=desk.last_token, publisher=publisher))
    state.record("lease", publisher=publisher, token=desk.last_token)
    return desk.lease


def renew(state: State, token: int) -> Lease:
    """Raises StalePublisher for any token but the current one."""
    desk, held = state.publisher, state.publisher.lease
    if held is None or held.token != token:
        holder = None if held is None else held.publisher
        status = "nobody holds the lease" if held is None else f"{holder!r} holds the lease"
        raise StalePublisher(
            f"token {token} is stale: {status} (last token {desk.last_token}); acquire a new one",
            {"token": token, "last_token": desk.last_token, "holder": holder},
        )
    desk.expires = state.now + held.duration_s
    return held


def gives_way(state: State) -> bool:
    """The lease is of calls without a token, and none is under way."""
    desk = state.publisher
    connecting = desk.rendezvous is not None and not desk.rendezvous[1].done
    return desk.shared and state.round is None and not connecting


def remaining_s(state: State) -> float:
    return max(0.0, state.publisher.expires - state.now)


def expire(state: State) -> str | None:
    """A closed round no longer needs its publisher, and may take longer than the lease."""
    desk, held = state.publisher, state.publisher.lease
    if held is None:
        return None
    if state.round is not None and state.round.close is not None:
        desk.expires = state.now + held.duration_s
    elif remaining_s(state) <= 0:
        unused, desk.lease = gives_way(state), None
        if unused:
            return None
        state.record("lease_expired", publisher=held.publisher, token=held.token)
        return held.publisher
    return None


def connection_to(state: State, publisher: str, members: Sequence[Member]) -> Connection:
    """Raises Conflict: no connection, or a communicator with an absent or dead member."""
    connection, broken_by = state.publisher.connection, state.publisher.broken_by
    if connection is None or connection.publisher != publisher:
        reason = "connect before opening a round: no publisher is connected"
        if broken_by is not None:
            reason = f"the transfer group ended with round {broken_by}, which was aborted; connect again"
        raise Conflict(reason, {"connect_again": True})
    if connection.collective and set(members) != set(connection.members):
        connected = [member.replica_id for member in connection.members]
        present = [member.replica_id for member in members]
        raise Conflict(
            f"the membership changed since the transfer group was formed: connected {connected}, "
            f"members now {present}; connect again",
            {"connect_again": True, "connected": connected, "members": present},
        )
    return connection


def connect(state: State, publisher: str, init_info: Mapping[str, JsonValue]) -> PendingCall:
    members, desk = state.for_round(), state.publisher
    if not members:
        raise FleetUnavailable("no replica is registered to connect to", {"expected": 1, "actual": 0})
    rank_offset = _checked_rank_offset(init_info, members)
    cancel_rendezvous(state)
    connection = Connection(
        publisher=publisher,
        init_info=init_info,
        rank_offset=rank_offset,
        members=tuple(members),
    )
    desk.connection, desk.told, desk.broken_by = connection, set(members), None
    bodies = {member: connection.connect_body(member) for member in members}
    call = membership.send(
        state, Connect.name, bodies, on_complete=partial(_connected, connection=connection)
    )
    desk.rendezvous = connection, call
    return call


def _connected(state: State, call: PendingCall, *, connection: Connection) -> None:
    """If no member connected, the publisher or the network is at fault. A member whose peers did not come is
    intact."""
    verdict = classify(call)
    not_done, absent = verdict.not_done, call.absent
    if not not_done and not absent:
        return
    if state.publisher.connection is connection:
        state.publisher.connection = None
    if not_done and not verdict.done and not verdict.transfer_failed:
        reason = f"no replica could connect: {join_reasons(not_done)}"
        call.finish(error=InvalidRequest(reason, {"replicas": not_done}))
        return
    membership.fence_each(state, verdict.to_fence, Connect.name)
    membership.count_failed_transfers(state, call, connection.missing(call))
    lacking = {**absent, **not_done}
    reason = f"connect again, these replicas are gone or lack their peers: {join_reasons(lacking)}"
    call.finish(error=Conflict(reason, {"connect_again": True, "replicas": lacking}))


def check_peers(state: State) -> None:
    if state.publisher.rendezvous is not None:
        connection, _ = state.publisher.rendezvous
        if connection.collective and any(each.out for each in connection.members):
            cancel_rendezvous(state)


def cancel_rendezvous(state: State) -> None:
    """Its members may be waiting for a peer."""
    current, state.publisher.rendezvous = state.publisher.rendezvous, None
    for member in () if current is None else tuple(current[1].waiting):
        membership.withdraw(member, lambda body: isinstance(body, Connect), delivered=True)
        membership.send_or_fence(state, member, Drop(round_id=None))


def break_connection(state: State, connection: Connection | None, round_id: int) -> None:
    """Members that drop their staging leave the transfer group, so no peer waits."""
    desk = state.publisher
    if connection is not None and connection.collective and desk.connection is connection:
        desk.connection, desk.broken_by = None, round_id


def bring_in(state: State) -> None:
    connection = state.publisher.connection
    if connection is None or connection.collective:
        return
    for member in state.live():
        if member not in state.publisher.told and not member.loading:
            state.publisher.told.add(member)
            membership.send_or_fence(state, member, connection.connect_body(member))


def _checked_rank_offset(init_info: Mapping[str, JsonValue], members: Sequence[Member]) -> int | None:
    """None if not collective. Raises InvalidRequest unless `world_size` counts the publisher's ranks and
    all workers."""
    if "rank_offset" not in init_info:
        return None
    offset, workers = init_info["rank_offset"], sum(member.world_size for member in members)
    if not isinstance(offset, int) or offset < 0:
        raise InvalidRequest(f"rank_offset: expected an integer of 0 or more, got {offset!r}")
    world_size = init_info.get("world_size", offset + workers)
    if not isinstance(world_size, int):
        raise InvalidRequest(f"world_size: expected {offset + workers}, got {world_size!r}")
    if world_size != offset + workers:
        raise InvalidRequest(
            f"world_size: expected {offset + workers} (rank_offset {offset} + {workers} workers of "
            f"{len(members)} replicas), got {world_size!r}",
            {"expected": offset + workers, "actual": world_size, "workers": workers},
        )
    return offset
