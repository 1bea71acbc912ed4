"""A publisher's lease and options, and the report of its round."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.protocol.poll import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    publisher: str
    token: int  # fencing token: calls with an older one are refused
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedLease:
    lease: Lease
    round_id: int | None
    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    after: int | None = None  # the version that the weights continue from, else Conflict; None: any
    persist: bool = False  # a replica writes the version to the store, because its publisher will not
    file_bytes: int | None = None  # size of all payloads, which are `FilePart`s and need no connection


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTimings:
    bytes: int = 0
    stage_s: float = 0.0
    verify_s: float = 0.0
    swap_s: float = 0.0
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """How far a replica's scores of the proof are from the trainer's, or from the other replicas'."""

    mean: float  # mean absolute difference of log-probabilities, in nats
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What `publish()` returns, and one entry of the history."""

    round_id: int
    version: int
    label: str | None
    epoch: int
    phase: str  # committed | aborted
    reason: str  # why it aborted, else empty
    duration_s: float
    opened_at: float = 0.0  # seconds since 1970, as `committed_at`
    committed_at: float | None = None  # when the commit was decided; None: it was not
    publisher: str = ""
    # Seconds by what the round waited for, in this order; their sum is `duration_s`. open: the publisher,
    # before its first payload. send: the publisher, between payloads. stage: replicas, which receive.
    # verify: their digests. drain: running requests. commit: until the last replica has swapped.
    parts: Mapping[str, float] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    digest: str | None = None  # over all tensors by checkpoint name; None: vLLM's own engines, not computed
    drafter: int | None = None  # the version of its drafter; 0: that of its checkpoint; None: it has none
    replicas: Mapping[str, ReplicaTimings] = field(
        default_factory=dict
    )  # empty in a large fleet's older ones
    # With `in_flight: wait`: replica -> requests that outlasted `drain_timeout_s` (-1: unknown). They aborted
    # the round; with `commit: rolling` they continued as with `keep`.
    not_drained: Mapping[str, int] = field(default_factory=dict)
    fenced: Mapping[str, str] = field(default_factory=dict)
    # After the round's end, and not in what `publish()` returns; a restarted controller has none.
    proof: Mapping[str, Deviation] = field(default_factory=dict)
    proof_reference: str = ""  # what they were compared with: trainer | replicas
