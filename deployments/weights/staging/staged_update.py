"""What one round has brought to a worker so far, and the judgement of its digests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from deployments.protocol import Outcome
from deployments.weights.wire.checkpoint_schema import join_reasons
from deployments.weights.wire.digest_definition import Digests, Findings, version_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was found in one chunk, still on the device."""

    names: Iterable[str]
    sent: torch.Tensor  # the digests that came along, int64 [n]
    found: Findings


@dataclass
class Session:
    offered: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    evidence: list[Evidence] = field(default_factory=list)  # of the payload that is arriving
    names: list[str] = field(default_factory=list)  # of all that was judged, and their digests
    found: list[Digests] = field(default_factory=list)
    digest: str = ""  # of the whole version, once it is sealed
    sealed: bool = False
    payloads_done: int = 0
    size_bytes: int = 0
    stage_s: float = 0.0
    verify_s: float = 0.0  # on a GPU: to launch it
    outcome: Outcome = Outcome.DONE
    message: str = ""

    def state(self) -> dict[str, Any]:
        """As JSON types. "digest" names the content of the whole version; empty until it is sealed."""
        return {
            "payloads_done": self.payloads_done,
            "bytes": self.size_bytes,
            "stage_s": self.stage_s,
            "verify_s": self.verify_s,
            "outcome": self.outcome.value,
            "message": self.message,
            "digest": self.digest,
        }

    def settle(self) -> None:
        """Judge what has come: one read-back a payload, which also waits for the staging's copies.

        Raises:
            ValueError: as `check`.
        """
        evidence, self.evidence = self.evidence, []
        if not evidence:
            return
        names = list(chain.from_iterable(part.names for part in evidence))
        columns = (
            torch.cat([part.sent for part in evidence]),
            torch.cat([part.found.sums for part in evidence])
            ^ torch.cat([part.found.sizes for part in evidence]),
            torch.cat([part.found.nonfinite for part in evidence]),
        )
        sent, found, bad = torch.stack(columns).cpu().numpy().view(np.uint64)
        check(names, sent, found, bad)
        self.names += names
        self.found.append(found)

    def seal(self) -> None:
        """All of the version has come."""
        self.digest = version_digest(self.names, self._digests())
        self.sealed = True

    def digests(self) -> dict[str, int]:
        """Of the tensors that came, by name."""
        return dict(zip(self.names, self._digests().tolist(), strict=True))

    def _digests(self) -> Digests:
        return np.concatenate(self.found) if self.found else np.empty(0, dtype=np.uint64)


def check(names: Sequence[str], sent: Digests, found: Digests, bad: Digests) -> None:
    """Compare digests, and refuse numbers that no optimizer means to publish.

    Args:
        bad: not zero where a tensor holds NaN or infinity.

    Raises:
        ValueError: names the tensors whose digest differs or that hold NaN or infinity.
    """
    torn = [
        f"{names[i]!r} was sent with digest {sent[i]:016x} and arrived with {found[i]:016x}"
        for i in np.flatnonzero(sent != found)
    ]
    if torn:
        raise ValueError(join_reasons(torn))
    wrong = [f"{names[i]!r} holds NaN or infinity" for i in np.flatnonzero(bad)]
    if wrong:
        raise ValueError(join_reasons(wrong))
