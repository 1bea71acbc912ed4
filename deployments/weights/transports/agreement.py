"""What ranks that send together agree on first: which replicas to connect to, or that connections are good.

    rank 0      asks the controller for the fleet's status ─┐
    all ranks   ◄── all_gather: who is connected, and to which membership

Rank 0 knows the fleet, and every rank knows its own connection. A rank that connected on its own would wait
for the others for good. Each membership needs a new connection: a process group that lost or gained a member
cannot be used again, and a restarted controller has no connection.
"""

from collections.abc import Callable
from dataclasses import dataclass

from deployments.errors import FleetUnavailable
from deployments.weights.transports.sender import gather_from_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The replicas that rank 0 found, as far as a connection depends on them."""

    epoch: int
    workers: int  # of all replicas together
    changed: bool  # since the connection was made


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankState:
    """What a rank contributes; all ranks see all of them."""

    connected: bool
    membership: Membership | None = None  # rank 0's
    problem: str | None = None  # why rank 0 has none


def agree(
    find: Callable[[], Membership] | None, *, connected: bool, together: bool = True
) -> Membership | None:
    """The membership that all ranks must connect to; None if all connections are still good.

    Args:
        find: on rank 0, asks the fleet; None on the others.
        connected: this rank has a connection, which is right for what it sends now.
        together: every rank calls this; else rank 0 alone.

    Raises:
        FleetUnavailable: rank 0 cannot send (on rank 0: whatever `find` raised).
    """
    membership, failure = None, None
    if find is not None:
        try:
            membership = find()
        except Exception as error:  # the other ranks must learn of it before it is raised
            failure = error
    problem = None if failure is None else str(failure)
    own = _RankState(connected=connected, membership=membership, problem=problem)
    ranks = gather_from_ranks(own) if together else [own]
    if failure is not None:
        raise failure
    if ranks[0].problem is not None:
        raise FleetUnavailable(f"rank 0 of the trainer cannot publish: {ranks[0].problem}")
    agreed = ranks[0].membership
    assert agreed is not None
    return agreed if agreed.changed or not all(rank.connected for rank in ranks) else None


def call_off(reason: str) -> None:
    """On rank 0, where the others wait in `agree`: it does not send, and they raise FleetUnavailable."""
    gather_from_ranks(_RankState(connected=False, problem=reason))
