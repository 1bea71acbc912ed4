"""What trainer ranks agree on before they send: whether to connect, and to which replicas.

    rank 0      asks the controller for the fleet's status ─┐
    all ranks   ◄── all_gather: who is connected, and to which epoch

A rank that connected alone would wait for the others forever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from deployments.protocol.errors import FleetUnavailable

T = TypeVar("T")


def gather_from_ranks(value: T) -> list[T]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTarget:
    epoch: int
    workers: int  # the sum over all replicas
    changed: bool  # since the connection was made


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankState:
    connected: bool
    target: PublishTarget | None = None  # set on rank 0
    problem: str | None = None  # why rank 0 has no target


def agree(
    find: Callable[[], PublishTarget] | None, *, connected: bool, together: bool = True
) -> PublishTarget | None:
    """The replicas that all ranks must connect to; None if all connections are still good. `find` asks the
    fleet, on rank 0. `together`: every rank calls this; else rank 0 alone. Raises FleetUnavailable if rank 0
    cannot send."""
    target, failure = None, None
    if find is not None:
        try:
            target = find()
        except Exception as error:  # the other ranks must learn of it before it is raised
            failure = error
    problem = None if failure is None else str(failure)
    own = _RankState(connected=connected, target=target, problem=problem)
    ranks = gather_from_ranks(own) if together else [own]
    if failure is not None:
        raise failure
    if ranks[0].problem is not None:
        raise FleetUnavailable(f"rank 0 of the trainer cannot publish: {ranks[0].problem}")
    agreed = ranks[0].target
    assert agreed is not None
    return agreed if agreed.changed or not all(rank.connected for rank in ranks) else None


def call_off(reason: str) -> None:
    """On rank 0: the others, which wait in `agree`, raise FleetUnavailable."""
    gather_from_ranks(_RankState(connected=False, problem=reason))
