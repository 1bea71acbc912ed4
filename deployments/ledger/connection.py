"""The publisher's tie to the fleet: which replicas, and which ranks of the transfer group are theirs.

Workers are counted over the members in the order in which they registered. A *collective*
connection (its `init_info` has `rank_offset`) is one communicator: it is good for exactly those
members, and a change of membership asks for a new one. Any other is a tie to each replica alone,
which a joiner gets too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from deployments.errors import Conflict, InvalidRequest
from deployments.ledger.members import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    connection_id: int
    publisher: str
    init_info: Mapping[str, Any]
    members: tuple[Member, ...]
    epoch: int

    @property
    def collective(self) -> bool:
        return "rank_offset" in self.init_info

    def init_info_of(self, member: Member) -> dict[str, Any]:
        if not self.collective:
            return dict(self.init_info)
        first = first_workers(self.members)[self.members.index(member)]
        return {**self.init_info, "rank_offset": self.init_info["rank_offset"] + first}

    def check_members(self, members: Sequence[Member]) -> None:
        """A communicator that lacks a member, or has a dead one, is never used again."""
        if not self.collective or set(members) == set(self.members):
            return
        connected = [member.replica_id for member in self.members]
        present = [member.replica_id for member in members]
        raise Conflict(
            f"the membership changed since the transfer group was made: connected {connected}, "
            f"members now {present}; connect again",
            {"connect_again": True, "connected": connected, "members": present},
        )


def first_workers(members: Sequence[Member]) -> list[int]:
    """For each member, how many workers come before its own."""
    return list(accumulate((member.world_size for member in members), initial=0))[:-1]


def check_world_size(init_info: Mapping[str, Any], members: Sequence[Member]) -> None:
    """The sender decides the size of the group; it must be its own ranks plus every worker."""
    if "rank_offset" not in init_info:
        return
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


def payload_of(payload: Any, members: Sequence[Member]) -> dict[str, Any]:
    """Each member's own part, by replica id: a list is indexed by worker, anything else is for all."""
    if not isinstance(payload, list):
        return {member.replica_id: payload for member in members}
    workers = sum(member.world_size for member in members)
    if len(payload) != workers:
        raise InvalidRequest(
            f"payload: expected one entry for each of {workers} workers, got {len(payload)}",
            {"expected": workers, "actual": len(payload)},
        )
    firsts = first_workers(members)
    return {
        member.replica_id: payload[first : first + member.world_size]
        for member, first in zip(members, firsts, strict=True)
    }
