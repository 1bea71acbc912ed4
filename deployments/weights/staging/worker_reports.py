"""What a worker reports to its replica, and its form on the way through vLLM's `collective_rpc`.

vLLM carries plain JSON types between a worker and the process that asks it, so reports are encoded on one
side and validated on the other.
"""

import mmap
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter

from deployments.host.shared_memory import SharedWords, create_mapping
from deployments.protocol.poll import Check, Outcome

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


# A page of shared memory in which the workers of a replica write how far their staging is.
#
# The replica's process reads it without a call to the workers. Each worker has a slot: a sequence number (odd
# while the slot is being written), the length of the report, and the report (JSON). One process writes a slot
# and one reads it.

SLOT_BYTES = 16384
_HEADER_BYTES = 16
_MAX_MESSAGE = 2000  # characters; JSON takes up to six bytes for each


class ProgressPage(SharedWords):
    """The last report of each worker, by worker index."""

    def __init__(self, mapping: mmap.mmap) -> None:
        super().__init__(mapping)
        self._bytes = self._words.cast("B")

    @classmethod
    def create(cls, workers: int) -> tuple[str, Self]:
        """A new page without reports, and the name of its segment, which the caller removes.

        Raises:
            OSError: there is no room in shared memory.
        """
        name, mapping = create_mapping(SLOT_BYTES * workers)
        return name, cls(mapping)

    def __len__(self) -> int:
        """The number of workers."""
        return len(self._bytes) // SLOT_BYTES

    def write(self, index: int, state: StagingState | None) -> None:
        """Write a worker's report; None erases it. A message that does not fit is shortened."""
        encoded = b"" if state is None else to_bytes(_shortened(state))
        word, start = self._slot(index)
        self._words[word] += 1
        self._bytes[start : start + len(encoded)] = encoded
        self._words[word + 1] = len(encoded)
        self._words[word] += 1

    def read(self, index: int) -> StagingState | None:
        """The last report of a worker; None if there is none, or if it is being written at this moment."""
        word, start = self._slot(index)
        sequence = self._words[word]
        encoded = bytes(self._bytes[start : start + self._words[word + 1]])
        if sequence % 2 or sequence != self._words[word] or not encoded:
            return None
        return from_bytes(StagingState, encoded)

    def _slot(self, index: int) -> tuple[int, int]:
        """Where a slot begins, in words, and where its report begins, in bytes."""
        offset = index * SLOT_BYTES
        return offset // self._words.itemsize, offset + _HEADER_BYTES


def _shortened(state: StagingState) -> StagingState:
    # A file name in an error may hold a lone surrogate, which UTF-8 cannot encode.
    message = state.message[:_MAX_MESSAGE].encode(errors="replace").decode()
    return replace(state, message=message)
