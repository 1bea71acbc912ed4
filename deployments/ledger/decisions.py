"""What the ledger must not forget: each decision is durable before any replica can learn of it.

Their JSON form is a file format. `Lasting` says which of them `recovery` still needs.
"""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter
from pydantic_core import PydanticSerializationError

from deployments.protocol.adapters import AdapterCatalog
from deployments.protocol.engine_state import InFlight, LastingOperation
from deployments.protocol.poll import Check, CommitMode, InitialWeights, KvCache
from deployments.protocol.publishing import RoundReport

KEPT_FENCES = 1000
KEPT_ROUNDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Its sequence numbers are above all earlier processes'."""

    generation: int
    kind: Literal["started"] = "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Founded:
    """Stores of two fleets, which number versions alike, may be mixed up."""

    fleet_id: str
    model: str | None = None
    initial: InitialWeights | None = None
    kind: Literal["founded"] = "founded"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseIssued:
    token: int
    publisher: str
    kind: Literal["lease_issued"] = "lease_issued"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Else a replica's leftovers could pass for a new round's."""

    round_id: int
    kind: Literal["opened"] = "opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    replica_id: str
    incarnation: str
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    round_id: int
    version: int
    label: str | None
    participants: tuple[Participant, ...]
    commit: CommitMode
    kv_cache: KvCache
    in_flight: InFlight
    persist: bool = False
    checks: tuple[Check, ...] = ()
    digest: str | None = None
    drafter: int | None = None
    kind: Literal["committed"] = "committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    version: int
    label: str
    kind: Literal["labelled"] = "labelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Every participant of a committed one serves its version or is certain not to."""

    report: RoundReport
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    version: int
    path: str
    label: str | None
    kind: Literal["stored"] = "stored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    member: Participant
    epoch: int
    kind: Literal["admitted"] = "admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    replica_id: str
    incarnation: str
    reason: str
    epoch: int
    told: bool  # it knows, or is gone; until then it may still take a request
    kind: Literal["fenced"] = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    wanted: int | None
    number: int
    kind: Literal["scaled"] = "scaled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cataloged:
    catalog: AdapterCatalog
    kind: Literal["cataloged"] = "cataloged"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStateChanged:
    """The end of a later committed round makes discarded weights intact."""

    steps: tuple[Annotated[LastingOperation, Field(discriminator="name")], ...]
    kind: Literal["engine_state_changed"] = "engine_state_changed"


Decision = (
    Started
    | Founded
    | LeaseIssued
    | Opened
    | Committed
    | Labelled
    | Ended
    | Stored
    | Admitted
    | Fenced
    | EngineStateChanged
    | Scaled
    | Cataloged
)

_ADAPTER: TypeAdapter[Decision] = TypeAdapter(Annotated[Decision, Field(discriminator="kind")])


class Lasting:
    """Decisions that no later one on the same subject supersedes."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, int]] = {}  # kind -> subject -> number, oldest first

    def add(self, number: int, decision: Decision) -> list[int]:
        """Returns the numbers of those no longer needed."""
        subject = _subject(decision)
        superseded = self._forget(decision.kind, subject)
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
    match decision:
        case Admitted():
            return decision.member.incarnation
        case Fenced():
            return decision.incarnation
        case Ended():
            return str(decision.report.round_id)
        case _:
            return ""


def encode(decision: Decision) -> bytes:
    """One JSON line; half a surrogate, which UTF-8 lacks, is escaped."""
    try:
        return _ADAPTER.dump_json(decision)
    except PydanticSerializationError:
        text = json.dumps(_ADAPTER.dump_python(decision, mode="json"), ensure_ascii=False)
        return re.sub("[\ud800-\udfff]", lambda half: rf"\\u{ord(half[0]):x}", text).encode()


def decode(line: bytes | str) -> Decision:
    """Raises pydantic's ValidationError (a ValueError) for what is not a decision."""
    return _ADAPTER.validate_json(line)
