"""What one round has brought to a worker so far, and the judgement of its digests."""

from dataclasses import dataclass, field
from typing import Any

import torch

from deployments.weights.digest import Findings, unsigned
from deployments.weights.manifest import sentence
from deployments.weights.protocol import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was found in one chunk, still on the device."""

    names: list[str]
    sent: torch.Tensor  # the digests that came along, int64 [n]
    found: Findings


@dataclass
class Session:
    offered: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    evidence: list[Evidence] = field(default_factory=list)  # of the payload that is arriving
    digests: dict[str, int] = field(default_factory=dict)
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
        names = [name for part in evidence for name in part.names]
        columns = (
            torch.cat([part.sent for part in evidence]),
            torch.cat([part.found.sums for part in evidence])
            ^ torch.cat([part.found.sizes for part in evidence]),
            torch.cat([part.found.bad for part in evidence]),
        )
        sent, found, bad = torch.stack(columns).cpu()
        check(names, unsigned(sent), unsigned(found), bad.tolist())
        self.digests |= zip(names, unsigned(found), strict=True)


def check(names: list[str], sent: list[int], found: list[int], bad: list[int]) -> None:
    """Compare digests, and refuse numbers that no optimizer means to publish.

    Raises:
        ValueError: names the tensors whose digest differs or that hold NaN or infinity.
    """
    torn = [
        f"{name!r} was sent with digest {a:016x} and arrived with {b:016x}"
        for name, a, b in zip(names, sent, found, strict=True)
        if a != b
    ]
    if torn:
        raise ValueError(sentence(torn))
    wrong = [f"{name!r} holds NaN or infinity" for name, is_bad in zip(names, bad, strict=True) if is_bad]
    if wrong:
        raise ValueError(sentence(wrong))
