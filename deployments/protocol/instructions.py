"""What the controller wants a replica to do: instructions, in the directive that answers its poll."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import JsonValue

from deployments.protocol.adapters import DropAdapter, LoadAdapter, ReceiveAdapter, SetAdapters
from deployments.protocol.files import FilePart
from deployments.protocol.operations import InFlight, Operation


class KvCache(StrEnum):
    """What happens to the KV cache of running requests at a commit."""

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
    payload: JsonValue | FilePart
    options: StagingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """No payload follows: check that the staged version is complete. Acknowledged with `Staged`."""

    name: ClassVar[str] = "verify"
    round_id: int


def drain_of_round(round_id: int) -> str:
    """The id of a round's drain, which COMMIT ends."""
    return f"round {round_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Begin no request, and let those that run come to their end; reports say how many still do."""

    name: ClassVar[str] = "drain"
    drain_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndDrain:
    """Begin requests again, unless another drain or a pause goes on."""

    name: ClassVar[str] = "end_drain"
    drain_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Swap between two decoding steps. Acknowledged with `Swapped`.

    `in_flight: wait` means that the replica was drained: no request runs.
    """

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
    """Load a stored version. `fleet_id`, `digest`: as in `JoinAnswer`."""

    name: ClassVar[str] = "catch_up"
    version: int
    path: str
    fleet_id: str | None = None
    digest: str | None = None


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
    fleet_id: str
    digest: str | None  # with which the version was committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """A retained version is in the store: free its memory."""

    name: ClassVar[str] = "forget"
    version: int


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
    | Call
    | WriteVersion
    | Forget
    | ReceiveAdapter
    | LoadAdapter
    | SetAdapters
    | DropAdapter
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    seq: int
    body: Body
    deadline_s: float  # how long the replica may take; the ledger fences it a little later


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How many replicas the operator wants. Replicas carry it to Serve's autoscaling policy."""

    wanted: int | None = None  # None: as many as the load needs
    number: int = 0  # counts the operator's wishes; 0: the configuration's


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What the controller wants of one replica."""

    admitted: bool  # may take requests
    instructions: Sequence[Instruction] = ()  # in order; those already seen are to be ignored
    acknowledged: Sequence[int] = ()  # acknowledgements that arrived: not to be sent again
    fenced: str | None = None  # the reason; stop for good
    may_leave: bool = False  # it leaves, and nothing waits for it any more
    wish: Wish = Wish()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """Where a starting replica gets its first weights: a directory that vLLM can load."""

    version: int
    path: str | None  # None: the checkpoint that the fleet was configured with
    fleet_id: str | None = None  # that its manifest must name; None: with path None alone
    digest: str | None = None  # that its manifest must name; None: not known
