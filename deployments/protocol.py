"""Messages between the publisher, the controller and the replicas: who says what to whom.

    publisher ── open/send/close ──► controller ◄── Report ── replica
                                        └─────── Directive ──►

A replica long-polls with a `Report`; the answer is a `Directive` made for that one replica. The
poll is its heartbeat. Instructions are delivered in order and at least once: a replica runs each
`seq` once, and acknowledges it in every report until the directive shows that it was heard.

No message here carries a tensor: payloads name where the bytes are (a segment, an IPC handle, a
broadcast that is about to start).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class InstructionKind(StrEnum):
    CONNECT = "connect"  # join the transfer group; args: {"init_info": {...}} with this replica's rank_offset
    BEGIN = (
        "begin"  # open a staging session; args: {"round_id", "keep": version | None, "kv_cache", "in_flight"}
    )
    RECEIVE = "receive"  # stage one payload; args: {"round_id": int, "payload": {...} | [{...}]}
    VERIFY = "verify"  # wait for the staging, check it; args: {"round_id", "manifest": {...} | None}
    COMMIT = "commit"  # swap between two steps; args: see CommitArgs
    RELEASE = "release"  # go on after a commit that held; args: {"round_id": int}
    DROP = "drop"  # forget the staging of a round, or leave a meeting; args: {"round_id": int | None}
    CATCH_UP = "catch_up"  # load a stored version; args: {"version": int, "path": str, "label": str | None}
    CALL = "call"  # a fleet-wide operation; args: {"operation": FleetOperation, "arguments": {...}}
    STORE = (
        "store"  # begin to write a kept version to the store; args: {"version", "label", "directory", "keep"}
    )
    FORGET = "forget"  # a kept version is in the store; args: {"version": int}


class FleetOperation(StrEnum):
    """vLLM's RL operations that the fleet carries out on every replica."""

    PAUSE = "pause"
    RESUME = "resume"
    IS_PAUSED = "is_paused"
    SLEEP = "sleep"
    WAKE_UP = "wake_up"
    IS_SLEEPING = "is_sleeping"
    RESET_PREFIX_CACHE = "reset_prefix_cache"
    ABORT_REQUESTS = "abort_requests"
    WEIGHT_CHECKER = "weight_checker"
    DISCONNECT = "disconnect"  # shutdown_weight_transfer_engine


class KvCache(StrEnum):
    RECOMPUTE = "recompute"
    KEEP = "keep"


class InFlight(StrEnum):
    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class CommitMode(StrEnum):
    TOGETHER = "together"
    ROLLING = "rolling"


class Outcome(StrEnum):
    DONE = "done"
    REJECTED = "rejected"  # no staging, yet this replica is sound: wrong payload, or nothing came in time
    BROKEN = "broken"  # the transfer broke, a peer or the publisher is gone: sound, and is to be sent again
    FAILED = "failed"  # this replica is broken, its weights may be uncertain: it is always fenced


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitArgs:
    round_id: int
    version: int
    label: str | None
    hold: bool  # stay paused after the swap until RELEASE (`commit: together`)
    kv_cache: KvCache
    in_flight: InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    seq: int
    kind: InstructionKind
    args: Mapping[str, Any]
    deadline_s: float  # how long the replica may take; the ledger fences it a little later


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    seq: int
    outcome: Outcome
    message: str = ""  # what was expected and what came, when not DONE
    value: Any = None  # an answer or timings, JSON types only


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """How a replica's last writing of a version to the store ended."""

    version: int
    label: str | None
    path: str
    problem: str  # why it is not in the store; empty if it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replica says of itself in every poll."""

    replica_id: str
    incarnation: str
    version: int  # the weights that its engine holds
    world_size: int  # TP x PP x DP workers
    staged_round: int | None  # a round whose staging is complete and verified here, or whose bytes are live
    kept_version: int | None = None  # committed; its tensors are kept for the store
    store_result: StoreResult | None = None
    acknowledgements: Sequence[Acknowledgement] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What the controller wants of one replica."""

    admitted: bool  # may take requests
    committed_version: int
    epoch: int
    instructions: Sequence[Instruction] = ()  # in order; those already seen are to be ignored
    heard: Sequence[int] = ()  # acknowledgements that need not be sent again
    fenced: str | None = None  # the reason; stop for good


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """Where a starting replica gets its first weights: a directory that vLLM can load."""

    version: int
    path: str | None  # None: the checkpoint that the fleet was configured with
    label: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    dtype: str  # torch's name without "torch."
    shape: tuple[int, ...]
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Names, dtypes, shapes and digests of a version's tensors, by Hugging Face name."""

    tensors: Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    publisher: str
    token: int  # fencing token: a call with an older one is refused
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """None means what the fleet was configured with.

    `persist`: a replica writes the version to the store after the commit, because its publisher will not.
    """

    label: str | None = None
    commit: CommitMode | None = None
    kv_cache: KvCache | None = None
    in_flight: InFlight | None = None
    persist: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTimings:
    bytes: int = 0
    stage_s: float = 0.0
    verify_s: float = 0.0
    swap_s: float = 0.0  # of the workers; on a GPU to queue the copies
    gap_s: float = 0.0  # from the call to commit until requests go on


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
    replicas: Mapping[str, ReplicaTimings] = field(default_factory=dict)
    fenced: Mapping[str, str] = field(default_factory=dict)  # replica -> why it was left behind
