"""Messages between the publisher, the controller and the replicas.

    publisher ── open/send/close ──► controller ◄── Report ── replica
                                        └─────── Directive ──►

A replica long-polls with a `Report`; the answer is a `Directive` made for that one replica. The poll is
its heartbeat. Instructions are delivered in order and at least once: a replica runs each `seq` once, and
acknowledges it in every report until a directive confirms that the acknowledgement arrived.

No message carries a tensor: payloads name where the bytes are (a segment, an IPC handle, a broadcast that
is about to start). `json_only` checks that where payloads enter the controller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

from deployments.errors import InvalidRequest

_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue, config=ConfigDict(ser_json_inf_nan="constants"))


def json_only(value: object, name: str) -> JsonValue:
    """The value itself, if it consists of JSON types alone.

    Raises:
        InvalidRequest: a tensor, bytes or another object is inside; names the first one's place.
    """
    try:
        return _JSON.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join([name, *(str(part) for part in first["loc"] if part not in _JSON_KINDS)])
        raise InvalidRequest(
            f"{path}: expected JSON types only (no tensors, no bytes), got {type(first['input']).__name__}"
        ) from None


_JSON_KINDS = ("list", "dict", "str", "int", "float", "bool", "none")  # pydantic's names of union members


class KvCache(StrEnum):
    """What happens to the KV cache of running requests at a commit."""

    RECOMPUTE = "recompute"
    KEEP = "keep"


class InFlight(StrEnum):
    """What a pause of the scheduler does with running requests; vLLM's pause modes."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class CommitMode(StrEnum):
    TOGETHER = "together"
    ROLLING = "rolling"


class SleepTag(StrEnum):
    """The parts of an engine that sleep and wake; vLLM's tags."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"


# -- operations: vLLM's RL routes, carried out on every replica ------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    name: ClassVar[str] = "pause"
    mode: InFlight = InFlight.ABORT
    clear_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    name: ClassVar[str] = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class IsPaused:
    name: ClassVar[str] = "is_paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Level 0 only stops scheduling, 1 moves the weights to host memory, 2 discards them."""

    name: ClassVar[str] = "sleep"
    level: int = 1
    mode: InFlight = InFlight.ABORT


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUp:
    """`tags` None wakes everything."""

    name: ClassVar[str] = "wake_up"
    tags: tuple[SleepTag, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IsSleeping:
    name: ClassVar[str] = "is_sleeping"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPrefixCache:
    name: ClassVar[str] = "reset_prefix_cache"
    reset_running_requests: bool = False
    reset_connector: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """`request_ids` empty or None aborts all requests."""

    name: ClassVar[str] = "abort_requests"
    request_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChecksums:
    """The checksums of vLLM's `/weight_checker`."""

    name: ClassVar[str] = "weight_checker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """vLLM's `shutdown_weight_transfer_engine`."""

    name: ClassVar[str] = "disconnect"


LastingOperation = Pause | Resume | Sleep | WakeUp  # their effect outlasts the call
Operation = (
    LastingOperation | IsPaused | IsSleeping | ResetPrefixCache | AbortRequests | WeightChecksums | Disconnect
)


# -- instructions: what the controller wants a replica to do ---------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Join the transfer group. `init_info` is the publisher's, with this replica's rank offset."""

    name: ClassVar[str] = "connect"
    init_info: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingOptions:
    """How a round is staged and will commit; the same for every payload of the round."""

    retain_version: int | None = None  # retain the received tensors as this version, for the store
    kv_cache: KvCache = KvCache.RECOMPUTE
    in_flight: InFlight = InFlight.KEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Stage one payload: one for all workers, or a list with one for each. The first of a round begins it."""

    name: ClassVar[str] = "receive"
    round_id: int
    payload: JsonValue
    options: StagingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """No payload follows: check that the staged version is complete. Acknowledged with `Staged`."""

    name: ClassVar[str] = "verify"
    round_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Swap between two decoding steps. Acknowledged with `Swapped`."""

    name: ClassVar[str] = "commit"
    round_id: int
    version: int
    hold: bool  # stay paused after the swap until RELEASE (`commit: together`)
    kv_cache: KvCache
    in_flight: InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Resume after a commit that held."""

    name: ClassVar[str] = "release"
    round_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Discard the staging of a round; without a round, leave a rendezvous."""

    name: ClassVar[str] = "drop"
    round_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """Load a stored version."""

    name: ClassVar[str] = "catch_up"
    version: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Carry out an operation. Acknowledged with its answer."""

    name: ClassVar[str] = "call"
    operation: Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteVersion:
    """Begin to write a retained version to the store; reports say how it ended."""

    name: ClassVar[str] = "store"
    version: int
    label: str | None
    directory: str
    max_versions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """A retained version is in the store: free its memory."""

    name: ClassVar[str] = "forget"
    version: int


Body = Connect | Receive | Verify | Commit | Release | Drop | CatchUp | Call | WriteVersion | Forget


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    seq: int
    body: Body
    deadline_s: float  # how long the replica may take; the ledger fences it a little later


# -- reports: what a replica says of itself --------------------------------------------------------


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version is complete on a replica."""

    digest: str  # of all its tensors
    compared: bool  # each tensor's digest equals the one that the publisher stated
    size_bytes: int
    stage_s: float
    verify_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    swap_s: float  # of the workers; on a GPU the time to queue the copies
    gap_s: float  # from the call to commit until requests go on


Value = Staged | Swapped | JsonValue  # JSON: the answer to an operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    seq: int
    outcome: Outcome
    message: str = ""  # what was expected and what came, when not DONE
    value: Value = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """How a replica's last write to the store ended."""

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
    retained_version: int | None = None  # committed; its tensors are retained for the store
    store_result: StoreResult | None = None
    acknowledgements: Sequence[Acknowledgement] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What the controller wants of one replica."""

    admitted: bool  # may take requests
    committed_version: int
    epoch: int
    instructions: Sequence[Instruction] = ()  # in order; those already seen are to be ignored
    acknowledged: Sequence[int] = ()  # acknowledgements that arrived: not to be sent again
    fenced: str | None = None  # the reason; stop for good


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """Where a starting replica gets its first weights: a directory that vLLM can load."""

    version: int
    path: str | None  # None: the checkpoint that the fleet was configured with


# -- publisher -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    publisher: str
    token: int  # fencing token: a call with an older one is refused
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSession:
    """The state of a publisher whose calls carry no token."""

    token: int
    round_id: int | None  # the open round


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """None means what the fleet was configured with.

    `persist`: a replica writes the version to the store after the commit, because its publisher will not.
    """

    commit: CommitMode | None = None
    kv_cache: KvCache | None = None
    in_flight: InFlight | None = None
    persist: bool = False


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
    replicas: Mapping[str, ReplicaTimings] = field(default_factory=dict)
    fenced: Mapping[str, str] = field(default_factory=dict)  # replica -> why it was left behind


# -- status ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    replica_id: str
    incarnation: str
    state: str  # returning | joining | serving | fenced
    admitted: bool
    version: int
    world_size: int
    silent_s: float  # since its last poll
    pending: Sequence[str]  # instructions that it has not acknowledged
    reason: str  # why it is fenced


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStatus:
    round_id: int
    version: int
    label: str | None
    phase: str
    age_s: float
    participants: Sequence[str]  # replica ids


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
class FleetStatus:
    """The body of `/fleet`."""

    committed_version: int
    label: str | None
    stored_version: int | None
    epoch: int
    ready: bool  # at least `min_replicas` serve
    min_replicas: int
    workers: int  # TP x PP x DP workers of all live replicas
    members: Sequence[MemberStatus]
    round: RoundStatus | None
    lease: LeaseStatus | None
    connection: ConnectionStatus | None
    store_problem: str | None  # why the committed version will not get into the store
    condition: Sequence[str]  # names of the operations that lead a fresh engine to the fleet's condition


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    event_id: int
    name: str
    at: float  # seconds; of the controller's clock inside it, since the epoch outside
    fields: Mapping[str, JsonValue]

    def body(self) -> dict[str, JsonValue]:
        """The event as `/fleet/events` sends it."""
        return {"id": self.event_id, "event": self.name, "at": self.at, **self.fields}
