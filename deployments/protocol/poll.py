"""A replica's poll: the `Report` that it sends and the `Directive` that answers it.

Instructions are delivered in order and at least once. A replica runs each `seq` once and repeats its
acknowledgement until confirmed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from pydantic import JsonValue

from deployments.protocol.adapters import LoadAdapter, LoadedAdapter, SetAdapters
from deployments.protocol.engine_state import EngineState, InFlight, Operation
from deployments.protocol.errors import printable
from deployments.protocol.routing import ReplicaEndpoint


class KvCache(StrEnum):
    RECOMPUTE = "recompute"
    KEEP = "keep"


class CommitMode(StrEnum):
    TOGETHER = "together"
    ROLLING = "rolling"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Join the transfer group. `init_info` is the publisher's, with this replica's rank offset."""

    name: ClassVar[str] = "connect"
    init_info: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A payload that replicas read from a safetensors file which all hosts see at the same path.

    Paths are absolute and without symbolic links. A replica rejects bytes whose digests differ.
    """

    directory: str
    path: str  # the file's, which may be elsewhere
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int], ...]
    digests: tuple[str, ...] = ()  # 16 hexadecimal digits each; empty until they are read
    config: Mapping[str, JsonValue] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Stage one payload: one for all workers, or a list with one for each. The first one begins the round."""

    name: ClassVar[str] = "receive"
    round_id: int
    payload: JsonValue | FilePart
    # The same for every payload of a round.
    retain_version: int | None = None  # keep the received tensors under this version, for a store
    in_flight: InFlight = InFlight.KEEP  # used with `staging: none`, which pauses here


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """No payload follows: check that the staged version is complete. Acknowledged with `Staged`."""

    name: ClassVar[str] = "verify"
    round_id: int


def drain_of_round(round_id: int) -> str:
    return f"round {round_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Start no request and let running ones finish; reports count them."""

    name: ClassVar[str] = "drain"
    drain_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndDrain:
    """Start requests again, unless another drain or a pause is active."""

    name: ClassVar[str] = "end_drain"
    drain_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Swap between two decoding steps. Acknowledged with `Swapped`.

    With `in_flight: wait` the replica has been drained: no request runs.
    """

    name: ClassVar[str] = "commit"
    round_id: int
    version: int
    hold: bool
    kv_cache: KvCache
    in_flight: InFlight
    keep: "WriteVersion | None" = None


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
class StoredVersion:
    """A directory that vLLM can load, and what its manifest must name."""

    version: int
    path: str
    fleet_id: str
    digest: str | None = None  # None: not known
    holders: tuple[ReplicaEndpoint, ...] = ()  # if hosts share no store: those that may have it


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    name: ClassVar[str] = "catch_up"
    stored: StoredVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOperation:
    """Run an operation. Acknowledged with its result."""

    name: ClassVar[str] = "call"
    operation: Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteVersion:
    """Write a retained version to the store; reports carry the result."""

    version: int
    label: str | None
    fleet_id: str
    digest: str | None


Body = (
    Connect
    | Receive
    | Verify
    | Drain
    | EndDrain
    | Commit
    | Release
    | Drop
    | CatchUp
    | RunOperation
    | LoadAdapter
    | SetAdapters
)
# They may wait for a peer but change no live weights, except with `staging: none` from the first byte on.
BEFORE_COMMIT = (Connect, Receive, Verify)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    seq: int
    body: Body
    deadline_s: float  # the ledger fences the replica a little later


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredReplicas:
    """The operator's number of replicas, which replicas relay to Serve's autoscaling policy."""

    wanted: int | None = None
    number: int = 0  # counts the operator's changes; 0: the configuration's


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    admitted: bool
    instructions: Sequence[Instruction] = ()
    acknowledged: Sequence[int] = ()
    fenced: str | None = None  # the reason; the replica stops for good
    may_leave: bool = False
    desired: DesiredReplicas = DesiredReplicas()
    trace: Mapping[str, str] | None = None  # `tracing.headers` of the call that opened the last round


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """What version 0 is: the weights of a directory, or a commit of a repository of Hugging Face's hub."""

    digest: str | None = None  # the directory's weight files, 32 hexadecimal digits
    commit: str | None = None
    revision: str | None = field(default=None, compare=False)  # the setting that led to the commit

    def __str__(self) -> str:
        return f"commit {self.commit}" if self.digest is None else f"digest {self.digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """Where a starting replica finds its first weights."""

    stored: StoredVersion | None = None  # None: version 0, the checkpoint that the fleet was configured with
    initial: InitialWeights | None = None  # what version 0 is; None: not known, or replaced
    served: bool = False  # others serve `initial`, so a replica with other weights may wait

    @property
    def version(self) -> int:
        return 0 if self.stored is None else self.stored.version


class Outcome(StrEnum):
    DONE = "done"
    REJECTED = "rejected"
    TRANSFER_FAILED = "transfer_failed"  # a peer or the publisher is gone; the replica is intact: send again
    REPLICA_FAILED = "replica_failed"  # its weights may be uncertain: it is always fenced


class Check(StrEnum):
    NAMES = "names"
    SHAPES = "shapes"
    DTYPES = "dtypes"  # the checkpoint's kind: floating point, or the same integers
    COMPLETE = "complete"
    FINITE = "finite"
    DIGESTS = "digests"  # each tensor's equals the one that the publisher stated
    REPLICAS = "replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    digest: str
    size_bytes: int
    stage_s: float
    verify_s: float
    checks: tuple[Check, ...] = ()
    drafter: bool | None = None  # whether a drafter's tensors came; None: the replica has no drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    swap_s: float  # the workers' time; GPU: to queue the copies
    gap_s: float  # the call to commit until requests continue


Value = Staged | Swapped | LoadedAdapter | JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    seq: int
    outcome: Outcome
    message: str = ""
    value: Value = None
    missing_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", printable(self.message))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    version: int
    label: str | None
    path: str
    problem: str  # why the version is not in the store; empty if it is

    def __post_init__(self) -> None:
        object.__setattr__(self, "problem", printable(self.problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloadable:
    """A version that a starting replica was told to load and cannot; version 0: it found other weights."""

    version: int
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


NO_NUMBER = -1e4  # stands for a score that is NaN or infinite; JSON has neither


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probabilities of the proof's tokens, in the order of `proof_sequences`; `adapters`: of
    its first ones, by NAME@VERSION."""

    version: int
    values: tuple[float, ...]
    adapters: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def finite(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(each if math.isfinite(each) else NO_NUMBER for each in values)

        object.__setattr__(self, "values", finite(self.values))
        adapters = {name: finite(values) for name, values in self.adapters.items()}
        object.__setattr__(self, "adapters", adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    drain_ids: Sequence[str]
    running: int | None  # running requests; None: the engine has not reported yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    replica_id: str
    incarnation: str
    version: int
    world_size: int
    staged_round: int | None  # staged and verified here, or its bytes are live
    retained_version: int | None = None  # committed; its tensors are kept for the store
    store_result: StoreResult | None = None
    endpoint: ReplicaEndpoint | None = None  # where others get versions from it; None: nowhere
    loading_version: int | None = None
    initial: InitialWeights | None = None
    updates_in_place: bool = False
    draining: Draining | None = None
    adapters: tuple[int, ...] = ()  # ids that its engine holds
    condition: EngineState = ()
    scores: Scores | None = None  # until a report with them is answered
    acknowledgements: Sequence[Acknowledgement] = ()
    number: int = 0  # counts this process's reports; the controller ignores one that a later one overtook
    failed: str = ""  # uncertain weights or a dead engine: takes no request until it is fenced
    fenced: bool = False  # knows that it is fenced, and takes no request
    leaving: bool = False  # no longer wanted: takes no new request and waits for `may_leave`
    drained: bool = False  # leaving, and no request runs on it
    ended: bool = False
