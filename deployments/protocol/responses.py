"""What our own routes answer, beside the messages of `deployments.protocol`; clients read the same types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.protocol.adapters import AdapterStatus
from deployments.protocol.publishing import RoundReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    type: str  # for a program, see `deployments.protocol.errors`
    message: str  # for a person: what was expected and what was given
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """The body of every answer that is not a success."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The body of `/health`; with status 503 while no replica serves."""

    status: str  # ok | starting
    serving: int  # replicas
    members: int  # replicas, whatever their state
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The rounds that ended, oldest first."""

    rounds: Sequence[RoundReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterList:
    """The versions of adapters: retired, live, and being loaded; each of them oldest first."""

    adapters: Sequence[AdapterStatus]


# -- vLLM's RL routes: the names are vLLM 0.32's ---------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    status: str  # paused | resumed; ok: an adapter is loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseState:
    is_paused: bool  # every replica


@dataclass(frozen=True, slots=True, kw_only=True)
class FellAsleep:
    status: str  # sleeping
    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WokeUp:
    status: str  # awake: all memory of every replica; else sleeping
    tags: Sequence[str] | None  # as they were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Success:
    success: bool  # on every replica


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepState:
    is_sleeping: bool  # every replica


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortedRequests:
    status: str
    aborted: int  # over all replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSize:
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInfo:
    weight_version: str  # the label of the committed version, or its number


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWeightVersion:
    success: bool
    new_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    checksums: Mapping[str, str]  # by tensor name


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    match: bool
    mismatches: Sequence[str]  # names of tensors
