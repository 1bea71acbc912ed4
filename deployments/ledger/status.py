"""The ledger's state as JSON, for `/fleet` and the web page."""

from typing import Any

from deployments.ledger.connection import Connection
from deployments.ledger.fleet import Fleet
from deployments.ledger.lease import LeaseDesk
from deployments.ledger.members import Member, MemberState
from deployments.ledger.round import Round
from deployments.ledger.version_state import RoundBook


def fleet_status(
    fleet: Fleet, book: RoundBook, lease: LeaseDesk, connection: Connection | None, now: float
) -> dict[str, Any]:
    """`ready`: enough replicas serve. `workers`: TP x PP x DP workers of all live replicas."""
    return {
        "committed_version": book.committed_version,
        "label": book.label,
        "stored_version": None if book.stored is None else book.stored.version,
        "epoch": fleet.epoch,
        "ready": len(fleet.serving()) >= fleet.config.min_replicas,
        "min_replicas": fleet.config.min_replicas,
        "workers": sum(member.world_size for member in fleet.live()),
        "members": [_member(member, now) for member in fleet.members.values()],
        "round": None if book.current is None else _round(book.current, now),
        "lease": _lease(lease, now),
        "connection": None if connection is None else _connection(connection),
    }


def _member(member: Member, now: float) -> dict[str, Any]:
    return {
        "replica_id": member.replica_id,
        "incarnation": member.incarnation,
        "state": member.state.value,
        "admitted": member.state is MemberState.SERVING,
        "version": member.version,
        "world_size": member.world_size,
        "silent_s": round(now - member.seen, 3),
        "pending": [order.instruction.kind.value for order in member.orders],
        "reason": member.reason,
    }


def _round(current: Round, now: float) -> dict[str, Any]:
    return {
        "round_id": current.round_id,
        "version": current.version,
        "label": current.label,
        "phase": current.phase.value,
        "age_s": round(now - current.opened, 3),
        "participants": [member.replica_id for member in current.participants],
    }


def _lease(lease: LeaseDesk, now: float) -> dict[str, Any] | None:
    """Without the token: that is for its holder alone."""
    if lease.held is None:
        return None
    return {"publisher": lease.held.publisher, "remaining_s": round(lease.remaining_s(now), 3)}


def _connection(connection: Connection) -> dict[str, Any]:
    return {
        "connection_id": connection.connection_id,
        "publisher": connection.publisher,
        "collective": connection.collective,
        "epoch": connection.epoch,
        "replicas": [member.replica_id for member in connection.members],
    }
