"""One attempt to move the fleet from a version to the next: what it holds, and how answers are judged."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from deployments.ledger.connection import Connection
from deployments.ledger.members import Member, Task
from deployments.protocol import (
    CommitMode,
    InFlight,
    KvCache,
    Manifest,
    ReplicaTimings,
    RoundReport,
)


class RoundPhase(StrEnum):
    OPEN = "open"  # payloads arrive
    VERIFYING = "verifying"  # closed; digests are awaited
    VERIFIED = "verified"  # only those that may serve without consent are awaited
    COMMITTING = "committing"  # decided: only forward from here
    RELEASING = "releasing"  # all have swapped and hold; they are let go
    COMMITTED = "committed"
    ABORTED = "aborted"


DECIDED = (RoundPhase.COMMITTING, RoundPhase.RELEASING, RoundPhase.COMMITTED)


@dataclass(slots=True, kw_only=True, eq=False)
class Round:
    round_id: int
    version: int
    label: str | None
    epoch: int
    opened: float
    participants: tuple[Member, ...]
    connection: Connection | None
    manifest: Manifest | None
    commit: CommitMode
    kv_cache: KvCache
    in_flight: InFlight
    persist: bool = False
    phase: RoundPhase = RoundPhase.OPEN
    close: Task | None = None  # what the publisher awaits
    commits: dict[Member, Task] = field(default_factory=dict)
    ordered: set[Member] = field(default_factory=set)  # those that were given COMMIT
    values: dict[str, dict[str, Any]] = field(default_factory=dict)  # replica id -> timings so far
    left_behind: dict[str, str] = field(default_factory=dict)  # replica id -> why

    @property
    def decided(self) -> bool:
        return self.phase in DECIDED

    @property
    def hold(self) -> bool:
        return self.commit is CommitMode.TOGETHER and len(self.participants) > 1

    def remaining(self) -> list[Member]:
        return [member for member in self.participants if member.alive]

    def note(self, task: Task) -> None:
        """Keep the figures that came with the answers."""
        for replica_id, answer in task.answers.items():
            if isinstance(answer.value, Mapping):
                self.values.setdefault(replica_id, {}).update(answer.value)

    def report(self, phase: RoundPhase, reason: str, now: float) -> RoundReport:
        left = {member.replica_id: member.reason for member in self.participants if member.out}
        return RoundReport(
            round_id=self.round_id,
            version=self.version,
            label=self.label,
            epoch=self.epoch,
            phase=phase.value,
            reason=reason,
            duration_s=now - self.opened,
            replicas={
                member.replica_id: timings(self.values.get(member.replica_id, {}))
                for member in self.participants
                if not member.out and member.replica_id not in self.left_behind
            },
            fenced={**self.left_behind, **left},
        )


def timings(values: Mapping[str, Any]) -> ReplicaTimings:
    known: dict[str, Any] = {
        each.name: values[each.name]
        for each in fields(ReplicaTimings)
        if isinstance(values.get(each.name), int | float)
    }
    return ReplicaTimings(**known)
