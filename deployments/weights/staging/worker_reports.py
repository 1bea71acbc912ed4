"""A worker's reports, and dataclasses in the JSON types of their calls."""

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

from deployments.protocol.poll import Check, FilePart, Outcome, StoreResult, WriteVersion

T = TypeVar("T")
MAX_MESSAGE = 2000  # characters: names are the publisher's, and a line to the replica is limited


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingState:
    """State of an update, or of a connection, which counts as one payload."""

    payloads_done: int
    size_bytes: int
    stage_s: float
    verify_s: float  # GPU: the time to launch the digests
    outcome: Outcome
    message: str = ""  # when not DONE
    digest: str = ""
    checks: tuple[Check, ...] = ()
    drafter: bool | None = None  # whether a drafter's tensors came; None: there is no drafter
    missing_ranks: tuple[int, ...] = ()


_KINDS = (StagingState, StoreResult, FilePart, WriteVersion)
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _KINDS}


def to_wire(report: Any) -> dict[str, Any]:
    return _ADAPTERS[type(report)].dump_python(report, mode="json")


def from_wire(kind: type[T], encoded: Any) -> T:
    return _ADAPTERS[kind].validate_python(encoded)
