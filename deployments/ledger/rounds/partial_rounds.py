"""Rounds that lack tensors: whoever takes part must have these as the fleet has them.

A round changes what its publisher sends. A joiner that holds an older version than the one since which the
rest is the same (`kept_since`) would serve the new number with tensors of two versions.
"""

from collections.abc import Sequence

from deployments.errors import FleetUnavailable
from deployments.ledger.connection import Connection
from deployments.ledger.members import Member, join_reasons
from deployments.protocol.publishing import RoundOptions


def lacks_of(options: RoundOptions, connection: Connection | None) -> str:
    """See `Connection.lacks`; a round of files has all tensors, whoever is connected."""
    return "" if connection is None or options.file_bytes is not None else connection.lacks


def holding(
    since: int, members: Sequence[Member], *, needed: int, connection: Connection | None
) -> list[Member]:
    """The members that hold this version or a later one. The others load one from the store first.

    Raises:
        FleetUnavailable: fewer than `needed` do, or the connection is a communicator, which needs all.
    """
    ready = [member for member in members if member.version >= since]
    collective = connection is not None and connection.collective
    if len(ready) == len(members) or (len(ready) >= needed and not collective):
        return ready
    behind = {each.replica_id: f"has version {each.version}" for each in members if each not in ready}
    raise FleetUnavailable(
        f"the publisher lacks tensors, which are the same since version {since}: these replicas must first "
        f"load that version or a later one from the store, or receive all tensors: {join_reasons(behind)}",
        {"since": since, "replicas": behind},
    )
