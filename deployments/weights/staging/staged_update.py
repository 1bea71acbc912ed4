"""What has arrived of one update at a worker, and its reports of it to the replica."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import TypeAdapter

from deployments.protocol.errors import TransferFailed
from deployments.protocol.poll import Check, FilePart, Outcome, StoreResult, WriteVersion
from deployments.weights.wire.checkpoint_schema import join_reasons, repeated
from deployments.weights.wire.chunk_layout import ReceivedChunk
from deployments.weights.wire.digest_definition import Digests, Findings, version_digest

Offered = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype, shape
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


_NOTHING = StagingState(payloads_done=0, size_bytes=0, stage_s=0.0, verify_s=0.0, outcome=Outcome.DONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFindings:
    names: Sequence[str]
    sent: torch.Tensor | None  # the publisher's digests, on the device; None: it states none
    found: Findings


@dataclass(slots=True, kw_only=True)
class StagedUpdate:
    """Changed on the staging thread; other threads only read `state`."""

    state: StagingState = _NOTHING
    from_files: bool = False
    offered: Offered = field(default_factory=dict)
    pending: list[ChunkFindings] = field(default_factory=list)

    names: list[str] = field(default_factory=list)
    compared: list[Digests] = field(default_factory=list)
    checks: frozenset[Check] = frozenset(Check) - {Check.REPLICAS}

    def note(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def offer(self, tensors: Offered) -> None:
        """Raises ValueError for a repeated tensor: two publishers would be mixed."""
        if problems := repeated(self.offered, tensors):
            raise ValueError(join_reasons(problems))
        self.offered |= tensors

    def add(self, received: ReceivedChunk, found: Findings) -> None:
        names = list(received.chunk.offered)
        self.pending.append(ChunkFindings(names=names, sent=received.sent, found=found))
        arrived = received.chunk.size_bytes if received.arrived_bytes is None else received.arrived_bytes
        self.note(size_bytes=self.state.size_bytes + arrived)

    def digests_of(self, names: Collection[str]) -> set[np.uint64]:
        digests = chain.from_iterable(self.compared)
        return {digest for name, digest in zip(self.names, digests, strict=True) if name in names}

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except TransferFailed as error:
            self._fail(Outcome.TRANSFER_FAILED, str(error), missing_ranks=error.missing_ranks)
        except ValueError as error:  # a transport or the schema rejects the payload
            self._fail(Outcome.REJECTED, str(error))
        except Exception as error:  # the outcome reports it
            self._fail(Outcome.REPLICA_FAILED, f"{type(error).__name__}: {error}")

    def _fail(self, outcome: Outcome, message: str, missing_ranks: tuple[int, ...] = ()) -> None:
        self.note(outcome=outcome, message=message[:MAX_MESSAGE], missing_ranks=missing_ranks)

    def compare_digests(self) -> None:
        """One read-back for all chunks since the last call; it also waits for the staging."""
        pending, self.pending = self.pending, []
        if not pending:
            return
        names = list(chain.from_iterable(part.names for part in pending))
        if any(part.sent is None for part in pending):
            self.checks -= {Check.DIGESTS}
        columns = (
            torch.cat([part.found.digests if part.sent is None else part.sent for part in pending]),
            torch.cat([part.found.sums for part in pending])
            ^ torch.cat([part.found.sizes for part in pending]),
            torch.cat([part.found.nonfinite for part in pending]),
        )
        sent, found, nonfinite = torch.stack(columns).cpu().numpy().view(np.uint64)
        compare(names, sent, found, nonfinite)
        self.names += names
        self.compared.append(found)

    def complete(self) -> None:
        digests = np.concatenate(self.compared) if self.compared else np.empty(0, dtype=np.uint64)
        checks = tuple(check for check in Check if check in self.checks)
        self.note(digest=version_digest(self.names, digests), checks=checks)


def compare(names: Sequence[str], sent: Digests, found: Digests, nonfinite: Digests) -> None:
    corrupted = [
        f"{names[i]!r} was sent with digest {sent[i]:016x} and arrived with {found[i]:016x}"
        for i in np.flatnonzero(sent != found)
    ]
    if corrupted:
        raise ValueError(join_reasons(corrupted))
    wrong = [f"{names[i]!r} holds NaN or infinity" for i in np.flatnonzero(nonfinite)]
    if wrong:
        raise ValueError(join_reasons(wrong))


_KINDS = (StagingState, StoreResult, FilePart, WriteVersion)
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _KINDS}


def to_wire(report: Any) -> dict[str, Any]:
    """In the JSON types of calls to a worker."""
    return _ADAPTERS[type(report)].dump_python(report, mode="json")


def from_wire(kind: type[T], encoded: Any) -> T:
    return _ADAPTERS[kind].validate_python(encoded)
