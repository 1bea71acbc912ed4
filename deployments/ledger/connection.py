"""The publisher's connection to the fleet: which replicas it reaches, and their ranks in the transfer group.

Ranks are counted over the members in the order of their registration. A *collective* connection (its
`init_info` has `rank_offset`) is one communicator: it is valid for exactly those members, and a change of
membership needs a new one. Any other connection reaches each replica separately, and a joiner gets it too;
one that loads a stored version gets it afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from pydantic import JsonValue

from deployments.ledger.dispatch import Dispatch
from deployments.ledger.members import Member, PendingCall, classify, join_reasons
from deployments.ledger.membership import Membership
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest
from deployments.protocol.poll import Body, Connect, Drop, FilePart
from deployments.protocol.responses import ConnectionStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One publisher's connection to the members of one epoch."""

    connection_id: int
    publisher: str
    init_info: Mapping[str, JsonValue]
    rank_offset: int | None  # of the first replica's first worker; None: not collective
    members: tuple[Member, ...]
    epoch: int

    @property
    def collective(self) -> bool:
        return self.rank_offset is not None

    def connect_body(self, member: Member) -> Connect:
        """The instruction that connects this member, with its own rank offset."""
        if self.rank_offset is None:
            return Connect(init_info=self.init_info)
        first = first_ranks(self.members)[self.members.index(member)]
        return Connect(init_info={**self.init_info, "rank_offset": self.rank_offset + first})

    def check_members(self, members: Sequence[Member]) -> None:
        """A communicator that lacks a member, or has a dead one, is never used again.

        Raises:
            Conflict: the membership changed; connect again.
        """
        if not self.collective or set(members) == set(self.members):
            return
        connected = [member.replica_id for member in self.members]
        present = [member.replica_id for member in members]
        raise Conflict(
            f"the membership changed since the transfer group was formed: connected {connected}, "
            f"members now {present}; connect again",
            {"connect_again": True, "connected": connected, "members": present},
        )

    def missing(self, call: PendingCall) -> dict[str, str]:
        """The members (by id) that did not answer their peers in a failed transfer, and who says so.

        Ranks below the members' are the publisher's.
        """
        if self.rank_offset is None:
            return {}
        said: dict[str, set[str]] = {}
        for member, first in zip(self.members, first_ranks(self.members), strict=True):
            ranks = range(self.rank_offset + first, self.rank_offset + first + member.world_size)
            for replica_id, answer in call.answers.items():
                if replica_id != member.replica_id and any(rank in ranks for rank in answer.missing_ranks):
                    said.setdefault(member.replica_id, set()).add(replica_id)
        return {named: f"missed by {sorted(by)}" for named, by in said.items()}

    def status(self) -> ConnectionStatus:
        return ConnectionStatus(
            connection_id=self.connection_id,
            publisher=self.publisher,
            collective=self.collective,
            epoch=self.epoch,
            replicas=tuple(member.replica_id for member in self.members),
        )


class Connections:
    """Makes, keeps and drops the publisher's connection."""

    def __init__(self, membership: Membership, dispatch: Dispatch) -> None:
        self._membership = membership
        self._dispatch = dispatch
        self._last_id = 0
        self._connecting: PendingCall | None = None
        self._current: Connection | None = None
        self._told: set[Member] = set()  # of the current connection
        self._broken_by: int | None = None  # the round with which the last transfer group ended

    @property
    def current(self) -> Connection | None:
        return self._current

    def status(self) -> ConnectionStatus | None:
        return None if self._current is None else self._current.status()

    def check(self, connection: Connection | None, members: Sequence[Member]) -> None:
        """Raises Conflict if the publisher has no connection, or not to these members."""
        if connection is not None:
            connection.check_members(members)
            return
        reason = "connect before opening a round: no publisher is connected"
        if self._broken_by is not None:
            reason = (
                f"the transfer group ended with round {self._broken_by}, which was aborted; connect again"
            )
        raise Conflict(reason, {"connect_again": True})

    def connect(self, publisher: str, init_info: Mapping[str, JsonValue], now: float) -> PendingCall:
        """Connect every member, each with its own rank offset. The call's result is the connection's id.

        Raises:
            FleetUnavailable: there is no member.
            InvalidRequest: `rank_offset` or `world_size` do not fit the members.
        """
        members = self._membership.for_round()
        if not members:
            raise FleetUnavailable("no replica is registered to connect to", {"expected": 1, "actual": 0})
        rank_offset = checked_rank_offset(init_info, members)
        self.give_up(now)
        self._last_id += 1
        connection = Connection(
            connection_id=self._last_id,
            publisher=publisher,
            init_info=init_info,
            rank_offset=rank_offset,
            members=tuple(members),
            epoch=self._membership.epoch,
        )
        self._current, self._told, self._broken_by = connection, set(members), None
        bodies = {member: connection.connect_body(member) for member in members}
        on_complete = partial(self._connected, connection)
        call = self._dispatch.send_each(Connect.name, bodies, now, on_complete=on_complete)
        call.result = connection.connection_id
        self._connecting = call
        return call

    def check_peers(self, now: float) -> None:
        """Nobody waits in the rendezvous of a communicator that has lost a member."""
        connection = self._current
        if connection is not None and connection.collective and any(each.out for each in connection.members):
            self.give_up(now)

    def give_up(self, now: float) -> None:
        """Cancel a connection that is being formed. Its members may be waiting for a peer."""
        call, self._connecting = self._connecting, None
        if call is not None:
            self.cancel(call, Connect, now)

    def cancel(self, call: PendingCall, kind: type[Body], now: float) -> None:
        """Nobody waits for this call over a connection any more. Its members may be waiting for a peer."""
        for member in tuple(call.waiting):
            self._dispatch.withdraw(member, kind, delivered=True)
            self._dispatch.send_each(
                Drop.name, {member: Drop(round_id=None)}, now, on_complete=self._fence_not_done
            )

    def of(self, publisher: str) -> Connection | None:
        """A connection belongs to its publisher; another one makes its own, unless it needs none."""
        current = self._current
        return current if current is not None and current.publisher == publisher else None

    def drop(self) -> None:
        self._current = None

    def broken(self, connection: Connection | None, round_id: int) -> None:
        """A round over it was aborted: each member that drops its staging leaves the transfer group, so that
        nobody there waits for a peer."""
        if connection is not None and connection.collective and self._current is connection:
            self._current, self._broken_by = None, round_id

    def bring_in(self, now: float) -> None:
        """Members that lack the current connection get it, if it is not collective."""
        connection = self._current
        if connection is None or connection.collective:
            return
        for member in self._membership.live():
            if member not in self._told and not member.loading:
                self._told.add(member)
                bodies = {member: connection.connect_body(member)}
                self._dispatch.send_each(Connect.name, bodies, now, on_complete=self._fence_not_done)

    def _fence_not_done(self, call: PendingCall, now: float) -> None:
        self._membership.fence_each(classify(call).not_done, call.name, now)

    def _connected(self, connection: Connection, call: PendingCall, now: float) -> None:
        """If it failed everywhere the publisher or the network is at fault, and no weight was touched.

        A member whose peers did not come is intact, and is not fenced for them.
        """
        verdict = classify(call)
        not_done, absent = verdict.not_done, call.absent
        if not not_done and not absent:
            return
        if self._current is connection:
            self._current = None
        if not_done and not verdict.done and not verdict.transfer_failed:
            reason = f"no replica could connect: {join_reasons(not_done)}"
            call.finish(error=InvalidRequest(reason, {"replicas": not_done}))
            return
        self._membership.fence_each(verdict.to_fence, Connect.name, now)
        missing = connection.missing(call)
        self._membership.count_failed_transfers(verdict, Connect.name, now, missing)
        lacking = {**absent, **not_done}
        reason = f"connect again, these replicas are gone or lack their peers: {join_reasons(lacking)}"
        call.finish(error=Conflict(reason, {"connect_again": True, "replicas": lacking}))


def first_ranks(members: Sequence[Member]) -> list[int]:
    """For each member, the number of workers of the members before it."""
    return list(accumulate((member.world_size for member in members), initial=0))[:-1]


def checked_rank_offset(init_info: Mapping[str, JsonValue], members: Sequence[Member]) -> int | None:
    """The `rank_offset` of a collective connection; None if it is not collective.

    Raises:
        InvalidRequest: it is no rank, or `world_size` is not the publisher's ranks plus every worker.
    """
    if "rank_offset" not in init_info:
        return None
    offset, workers = init_info["rank_offset"], sum(member.world_size for member in members)
    if not isinstance(offset, int) or offset < 0:
        raise InvalidRequest(f"rank_offset: expected an integer of 0 or more, got {offset!r}")
    world_size = init_info.get("world_size", offset + workers)
    if world_size != offset + workers:
        raise InvalidRequest(
            f"world_size: expected {offset + workers} (rank_offset {offset} + {workers} workers of "
            f"{len(members)} replicas), got {world_size!r}",
            {"expected": offset + workers, "actual": world_size, "workers": workers},
        )
    return offset


def split_payload(
    payload: JsonValue | FilePart, members: Sequence[Member]
) -> dict[Member, JsonValue | FilePart]:
    """Each member's part: a list has one entry per worker, anything else is for all.

    Raises:
        InvalidRequest: a list of another length.
    """
    if not isinstance(payload, list):
        return dict.fromkeys(members, payload)
    workers = sum(member.world_size for member in members)
    if len(payload) != workers:
        raise InvalidRequest(
            f"payload: expected one entry for each of {workers} workers, got {len(payload)}",
            {"expected": workers, "actual": len(payload)},
        )
    return {
        member: payload[first : first + member.world_size]
        for member, first in zip(members, first_ranks(members), strict=True)
    }
