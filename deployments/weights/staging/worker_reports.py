"""What a worker reports to its replica: through `collective_rpc`, or on a page of shared memory."""

import mmap
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter

from deployments.host.shared_memory import create_mapping, open_mapping
from deployments.protocol.poll import Check, FilePart, Outcome, StoreResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectState:
    done: bool
    outcome: Outcome
    message: str = ""
    missing_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingState:
    payloads_done: int
    size_bytes: int
    stage_s: float
    verify_s: float  # GPU: the time to launch the digests
    outcome: Outcome
    message: str = ""  # when not DONE
    digest: str = ""  # the whole version's, once it is complete
    checks: tuple[Check, ...] = ()  # passed, once it is complete
    drafter: bool | None = None  # whether a drafter's tensors came; None: there is no drafter
    missing_ranks: tuple[int, ...] = ()


_KINDS = (ConnectState, StagingState, StoreResult, FilePart)
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _KINDS}


def to_wire(report: Any) -> dict[str, Any]:
    return _ADAPTERS[type(report)].dump_python(report, mode="json")


def from_wire(kind: type[T], encoded: Any) -> T:
    """Raises ValueError if it is not a report of this kind."""
    return _ADAPTERS[kind].validate_python(encoded)


SLOT_BYTES = 16384
_HEADER_BYTES = 16
_MAX_MESSAGE = 2000  # characters; JSON takes up to six bytes for each


class ProgressPage:
    """The last report of each worker: a sequence number (odd while it is written), the length, JSON."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._words = memoryview(mapping).cast("q")
        self._bytes = self._words.cast("B")

    @classmethod
    def open(cls, name: str) -> Self:
        """Map another process's page. Raises ValueError if it is on another host."""
        return cls(open_mapping(name, mmap.ACCESS_WRITE))

    @classmethod
    def create(cls, workers: int) -> tuple[str, Self]:
        """A new page, and its segment's name, which the caller removes."""
        name, mapping = create_mapping(SLOT_BYTES * workers)
        return name, cls(mapping)

    def write(self, index: int, state: StagingState | None) -> None:
        encoded = b""
        if state is not None:
            # UTF-8 cannot encode half a surrogate, as in a file name.
            message = state.message[:_MAX_MESSAGE].encode(errors="replace").decode()
            encoded = _ADAPTERS[StagingState].dump_json(replace(state, message=message))
        word, start = self._slot(index)
        self._words[word] += 1
        self._bytes[start : start + len(encoded)] = encoded
        self._words[word + 1] = len(encoded)
        self._words[word] += 1

    def read(self, index: int) -> StagingState | None:
        """None: there is none, or it is being written."""
        word, start = self._slot(index)
        sequence = self._words[word]
        encoded = bytes(self._bytes[start : start + self._words[word + 1]])
        if sequence % 2 or sequence != self._words[word] or not encoded:
            return None
        return _ADAPTERS[StagingState].validate_json(encoded)

    def _slot(self, index: int) -> tuple[int, int]:
        offset = index * SLOT_BYTES
        return offset // self._words.itemsize, offset + _HEADER_BYTES
