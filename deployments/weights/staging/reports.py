"""What a worker reports to its replica, and its form on the way through vLLM's `collective_rpc`.

vLLM carries plain JSON types between a worker and the process that asks it, so reports are encoded on one
side and validated on the other.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

from deployments.protocol.reports import Check, Outcome

T = TypeVar("T")
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectState:
    """How far a worker is with joining the transfer group."""

    done: bool
    outcome: Outcome
    message: str = ""
    missing_ranks: tuple[int, ...] = ()  # of the transfer group, where a transfer failed


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingState:
    """How far a worker is with the update that it stages."""

    payloads_done: int
    size_bytes: int
    stage_s: float
    verify_s: float  # on a GPU the time to launch the digests
    outcome: Outcome
    message: str = ""  # what was expected and what was received, when not DONE
    digest: str = ""  # of the whole version, once it is complete
    checks: tuple[Check, ...] = ()  # that it has passed, once it is complete
    missing_ranks: tuple[int, ...] = ()  # of the transfer group, where a transfer failed


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlanSummary:
    """How much of a version a worker loads by recorded plans instead of vLLM's loaders."""

    chunks: int = 0  # that have a plan
    refused: tuple[str, ...] = ()  # why other chunks have none, each reason once


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def to_wire(report: Any) -> dict[str, Any]:
    """A report as JSON types."""
    encoded: dict[str, Any] = _adapter(type(report)).dump_python(report, mode="json")
    return encoded


def from_wire(kind: type[T], encoded: Any) -> T:
    """The inverse of `to_wire`.

    Raises:
        ValueError: not a report of this kind.
    """
    report: T = _adapter(kind).validate_python(encoded)
    return report


def to_bytes(report: Any) -> bytes:
    """A report as one line of JSON."""
    return _adapter(type(report)).dump_json(report)


def from_bytes(kind: type[T], encoded: bytes) -> T:
    """The inverse of `to_bytes`.

    Raises:
        ValueError: not a report of this kind.
    """
    report: T = _adapter(kind).validate_json(encoded)
    return report
