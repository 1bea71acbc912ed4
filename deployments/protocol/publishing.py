"""A publisher's lease and options, and the report of its round."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from deployments.protocol.instructions import CommitMode, KvCache
from deployments.protocol.operations import InFlight
from deployments.protocol.reports import Check, Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    publisher: str
    token: int  # fencing token: a call with an older one is refused
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedLease:
    """What a publisher whose calls carry no token needs for one of them."""

    lease: Lease
    round_id: int | None  # the open round
    remaining_s: float  # of the lease


class DrainFallback(StrEnum):
    """What becomes of a round with `in_flight: wait` while requests still run after `drain_timeout_s`."""

    ABORT = "abort"  # the fleet keeps its version, and the publisher is told why
    KEEP = "keep"  # it is committed as with `in_flight: keep`, and its report says so


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """None means what the fleet was configured with.

    `persist`: a replica writes the version to the store after the commit, because its publisher will not.
    `file_bytes`: the payloads are `FilePart`s, of so many bytes in all; such a round needs no connection.
    """

    commit: CommitMode | None = None
    kv_cache: KvCache | None = None
    in_flight: InFlight | None = None
    drain_timeout_s: float | None = None
    drain_fallback: DrainFallback | None = None
    persist: bool = False
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTimings:
    bytes: int = 0
    stage_s: float = 0.0
    verify_s: float = 0.0
    swap_s: float = 0.0  # as in `Swapped`
    gap_s: float = 0.0


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
    verification: Verification = Verification.NONE
    checks: tuple[Check, ...] = ()  # that every replica has made before the commit
    digest: str | None = None  # of all tensors by checkpoint name; None: not computed (vLLM's own engines)
    replicas: Mapping[str, ReplicaTimings] = field(
        default_factory=dict
    )  # empty in a large fleet's older ones
    # Replica -> requests that still ran there when `drain_timeout_s` was over (-1: it could not say), with
    # `in_flight: wait`. If the round is committed they went on as with `keep`.
    not_drained: Mapping[str, int] = field(default_factory=dict)
    fenced: Mapping[str, str] = field(default_factory=dict)  # replica -> why it was left behind
