"""What the controller tells about the fleet: `/fleet` and `/fleet/events`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    replica_id: str
    incarnation: str
    state: str  # returning | joining | serving | leaving | fenced
    admitted: bool
    version: int
    world_size: int
    silent_s: float  # since its last poll
    pending: Sequence[str]  # instructions that it has not acknowledged
    reason: str  # why it is fenced
    draining: bool = False  # it begins no request, and lets those that run end
    running: int | None = None  # requests that still run there while it drains


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStatus:
    round_id: int
    version: int
    label: str | None
    phase: str
    age_s: float
    participants: Sequence[str]  # replica ids
    file_bytes: int | None = None  # of the files that the version is read from; None: it is sent
    sent_bytes: int = 0  # of these, what the replicas were told to read so far


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus:
    """Without the token: that is for its holder alone."""

    publisher: str
    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatus:
    connection_id: int
    publisher: str
    collective: bool
    epoch: int
    replicas: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeStatus:
    """How many replicas there are, and how many there should be."""

    wanted: int | None  # None: as many as the load needs, between `least` and `most`
    least: int
    most: int
    running: int  # serve
    joining: int  # alive, and not serving yet
    leaving: int  # finish their requests, and end
    problem: str | None  # why there are fewer than wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The body of `/fleet`."""

    fleet_id: str  # of this state directory; in the manifests of its versions
    committed_version: int
    label: str | None
    stored_version: int | None
    epoch: int
    ready: bool  # at least `min_replicas` serve
    min_replicas: int
    size: SizeStatus
    workers: int  # TP x PP x DP workers of all live replicas
    members: Sequence[MemberStatus]
    round: RoundStatus | None
    lease: LeaseStatus | None
    connection: ConnectionStatus | None
    store_problem: str | None  # why the committed version will not get into the store
    condition: Sequence[str]  # names of the operations that lead a fresh engine to the fleet's condition
    rounds_ended: Mapping[str, int] = field(default_factory=dict)  # of this state directory, by their outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHealth:
    """What `/health` needs of the fleet, however large it is."""

    serving: int  # replicas
    members: int  # replicas, whatever their state
    committed_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    event_id: int
    name: str
    at: float  # seconds; of the controller's clock inside it, since the epoch outside
    fields: Mapping[str, JsonValue]

    def body(self) -> dict[str, JsonValue]:
        """The event as `/fleet/events` sends it."""
        return {"id": self.event_id, "event": self.name, "at": self.at, **self.fields}
