"""What a replica says of itself in every poll."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import JsonValue

from deployments.protocol.adapters import NO_ADAPTERS, AdapterState, LoadedAdapter
from deployments.protocol.operations import LastingOperation


class Outcome(StrEnum):
    DONE = "done"
    REJECTED = "rejected"  # nothing is staged, the replica is intact: wrong payload, or nothing came in time
    TRANSFER_FAILED = "transfer_failed"  # a peer or the publisher is gone: the replica is intact, send again
    REPLICA_FAILED = "replica_failed"  # its weights may be uncertain: it is always fenced


class Verification(StrEnum):
    """What the digests of a round were compared with."""

    PUBLISHER = "publisher"  # each tensor's digest with the one that the publisher stated for it
    REPLICAS = "replicas"  # the replicas' digests with each other; the publisher stated none
    NONE = "none"  # nothing: one replica, and a publisher that states none (or not recorded)


class Check(StrEnum):
    """What was checked of a round before its commit."""

    NAMES = "names"  # each tensor is one of the model's
    SHAPES = "shapes"
    DTYPES = "dtypes"  # each is of the checkpoint's kind: a floating-point one, or the same integers
    COMPLETE = "complete"  # every tensor of the model came, once
    FINITE = "finite"  # none holds NaN or infinity
    DIGESTS = "digests"  # each tensor's digest equals the one that the publisher stated
    REPLICAS = "replicas"  # the replicas' digests equal each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version is complete on a replica."""

    digest: str  # of all its tensors
    compared: bool  # each tensor's digest equals the one that the publisher stated
    size_bytes: int
    stage_s: float
    verify_s: float
    checks: tuple[Check, ...] = ()  # all that its workers have made
    by_name: bool = False  # `digest` is that of the tensors that arrived, by checkpoint name


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    swap_s: float  # of the workers; on a GPU the time to queue the copies
    gap_s: float  # from the call to commit until requests go on


Value = Staged | Swapped | LoadedAdapter | JsonValue  # JSON: the answer to an operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    seq: int
    outcome: Outcome
    message: str = ""  # what was expected and what came, when not DONE
    value: Value = None
    missing_ranks: tuple[int, ...] = ()  # of the transfer group: did not answer when TRANSFER_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """How a replica's last write to the store ended."""

    version: int
    label: str | None
    path: str
    problem: str  # why it is not in the store; empty if it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloadable:
    """A stored version that a starting replica was told to load and cannot."""

    version: int
    reason: str  # what was expected and what is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """The replica begins no request, and lets those that run come to their end."""

    drain_ids: Sequence[str]  # who asked for it
    running: int | None  # requests that still run; None: its engine has not said so yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replica says of itself in every poll."""

    replica_id: str
    incarnation: str
    version: int  # the weights that its engine holds
    world_size: int  # TP x PP x DP workers
    staged_round: int | None  # a round whose staging is complete and verified here, or whose bytes are live
    retained_version: int | None = None  # committed; its tensors are retained for the store
    store_result: StoreResult | None = None
    loading_version: int | None = None  # a stored version that it loads now
    updates_in_place: bool = False  # RECEIVE changes its live weights (`staging: none`)
    draining: Draining | None = None
    adapters: AdapterState = NO_ADAPTERS
    condition: tuple[LastingOperation, ...] = ()  # paused or asleep, see `deployments.protocol.engine_state`
    acknowledgements: Sequence[Acknowledgement] = ()
    number: int = (
        0  # counts the reports of its process: one that a later one has overtaken says nothing any more
    )
    failed: str = (
        ""  # its weights are uncertain, or its engine is dead: it takes no request until it is fenced
    )
    fenced: bool = False  # it has heard that it is fenced, and takes no request
    leaving: bool = False  # it is no longer wanted: it takes no new request, and ends once it may
    drained: bool = False  # it leaves, and no request is running on it
    ended: bool = False  # its last report
