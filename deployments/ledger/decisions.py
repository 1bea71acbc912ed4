"""What the ledger must not forget: each decision is durable before any replica can learn of it.

The set is closed and small. `recover` folds decisions back into a ledger, and `Lasting` knows which of them
that fold still needs. Their JSON form is a file format.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, TypeAdapter

from deployments.protocol.adapters import AdapterCatalog
from deployments.protocol.engine_state import (
    EngineState,
    InFlight,
    LastingOperation,
    Pause,
    Resume,
    Sleep,
    WakeUp,
)
from deployments.protocol.poll import Check, CommitMode, KvCache, Verification
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import Event

KEPT_FENCES = 1000
KEPT_ROUNDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A controller process began; its sequence numbers are above those of every earlier one."""

    generation: int
    kind: Literal["started"] = "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Founded:
    """The fleet has an id: two fleets number their versions alike, and their stores may be mixed up."""

    fleet_id: str
    model: str | None = None  # whose versions they are; None until it is known
    kind: Literal["founded"] = "founded"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseIssued:
    token: int
    publisher: str
    kind: Literal["lease_issued"] = "lease_issued"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChanged:
    epoch: int
    kind: Literal["epoch_changed"] = "epoch_changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A round id was used. Without it a replica's leftovers could be taken for a new round's."""

    round_id: int
    kind: Literal["opened"] = "opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    replica_id: str
    incarnation: str
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """From here on the round only rolls forward."""

    round_id: int
    version: int
    label: str | None
    participants: tuple[Participant, ...]
    commit: CommitMode
    kv_cache: KvCache
    in_flight: InFlight
    persist: bool = False  # a replica writes it to the store
    verification: Verification = Verification.NONE
    checks: tuple[Check, ...] = ()
    digest: str | None = None  # of all its tensors; see `RoundReport`
    kind: Literal["committed"] = "committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """The committed version got another label."""

    version: int
    label: str
    kind: Literal["labelled"] = "labelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Every participant of a committed round serves its version, or is certain not to serve."""

    round_id: int
    kind: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    round_id: int
    reason: str
    kind: Literal["aborted"] = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A round's entry in the history: nothing is decided by it."""

    report: RoundReport
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    version: int
    path: str
    label: str | None
    kind: Literal["stored"] = "stored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """A joiner was told to load this stored version: it stays on the disk until the joiner holds it."""

    replica_id: str
    incarnation: str
    version: int
    path: str
    kind: Literal["promised"] = "promised"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseEnded:
    """The joiner holds it, is gone, or had its time."""

    incarnation: str
    kind: Literal["promise_ended"] = "promise_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """It may take requests from now on, and goes on doing so while the controller restarts."""

    member: Participant
    kind: Literal["admitted"] = "admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """This incarnation never serves again, whoever asks."""

    replica_id: str
    incarnation: str
    reason: str
    told: bool  # it knows, or is gone; before that it may still take a request
    kind: Literal["fenced"] = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """The operator wants so many replicas; None: as many as the load needs."""

    wanted: int | None
    number: int  # counts the changes
    kind: Literal["scaled"] = "scaled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cataloged:
    """The adapters changed: all of them, as they are from here on."""

    catalog: AdapterCatalog
    kind: Literal["cataloged"] = "cataloged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A lasting operation as the journal writes it."""

    operation: str  # its name
    arguments: Mapping[str, Any]

    def restored(self) -> LastingOperation:
        """Raises ValueError for an unknown operation, or arguments that it does not have."""
        if self.operation not in _OPERATIONS:
            raise ValueError(f"operation: expected one of {sorted(_OPERATIONS)}, got {self.operation!r}")
        return _OPERATIONS[self.operation].validate_python(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioned:
    """The condition that users put the fleet in (paused, asleep). A later `Finished` makes discarded weights
    intact."""

    steps: tuple[Step, ...]
    kind: Literal["conditioned"] = "conditioned"

    @classmethod
    def of(cls, condition: EngineState) -> Self:
        return cls(steps=tuple(Step(operation=each.name, arguments=asdict(each)) for each in condition))

    def condition(self) -> EngineState:
        """The operations.

        Raises:
            ValueError: an unknown operation, or arguments that it does not have.
        """
        return tuple(step.restored() for step in self.steps)


_OPERATIONS: Mapping[str, TypeAdapter[LastingOperation]] = {
    kind.name: TypeAdapter(kind) for kind in (Pause, Resume, Sleep, WakeUp)
}

Decision = (
    Started
    | Founded
    | LeaseIssued
    | EpochChanged
    | Opened
    | Committed
    | Labelled
    | Finished
    | Aborted
    | Ended
    | Stored
    | Promised
    | PromiseEnded
    | Admitted
    | Fenced
    | Conditioned
    | Scaled
    | Cataloged
)

_ADAPTER: TypeAdapter[Decision] = TypeAdapter(Annotated[Decision, Field(discriminator="kind")])


class DecisionLog:
    """Decisions that are not durable yet."""

    def __init__(self) -> None:
        self._decisions: list[Decision] = []

    def append(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def take(self) -> list[Decision]:
        """The decisions since the last call, in order."""
        taken, self._decisions = self._decisions, []
        return taken


class Lasting:
    """Which decisions are still needed: those that no later one on the same subject superseded."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, int]] = {}  # kind -> subject -> number, oldest first

    def add(self, number: int, decision: Decision) -> list[int]:
        """Take in the next decision. Returns the numbers of those not needed any more, maybe its own."""
        subject = _subject(decision)
        superseded = self._forget(decision.kind, subject)
        if isinstance(decision, PromiseEnded):
            return [number, *self._forget("promised", subject)]
        if isinstance(decision, Fenced) and decision.told:
            superseded += self._forget("admitted", subject)
        of_kind = self._numbers.setdefault(decision.kind, {})
        of_kind[subject] = number
        if len(of_kind) > {"fenced": KEPT_FENCES, "ended": KEPT_ROUNDS}.get(decision.kind, len(of_kind)):
            superseded += self._forget(decision.kind, next(iter(of_kind)))
        return superseded

    def _forget(self, kind: str, subject: str) -> list[int]:
        number = self._numbers.get(kind, {}).pop(subject, None)
        return [] if number is None else [number]


def _subject(decision: Decision) -> str:
    """A later decision of the same kind on the same subject supersedes an earlier one."""
    match decision:
        case Admitted():
            return decision.member.incarnation
        case Promised() | PromiseEnded() | Fenced():
            return decision.incarnation
        case Ended():
            return str(decision.report.round_id)
        case _:
            return ""


def encode(decision: Decision) -> bytes:
    """One line of JSON, without the newline."""
    return _ADAPTER.dump_json(decision)


def decode(line: bytes | str) -> Decision:
    """Raises pydantic's ValidationError (a ValueError) for what is not a decision."""
    return _ADAPTER.validate_json(line)


ID_SPAN = 10**9  # numbers that one controller process can give out before those of the next begin


class EventLog:
    """Events with increasing ids; a restarted controller's ids are above the earlier ones."""

    def __init__(self, capacity: int = 1000) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._next_id = 1

    def start_generation(self, generation: int) -> None:
        self._next_id = generation * ID_SPAN + 1

    def record(self, event: str, now: float, **fields: JsonValue) -> None:
        self._events.append(Event(event_id=self._next_id, name=event, at=now, fields=fields))
        self._next_id += 1

    def since(self, event_id: int) -> list[Event]:
        """Events with a greater id, oldest first."""
        newer = itertools.takewhile(lambda event: event.event_id > event_id, reversed(self._events))
        return list(newer)[::-1]
