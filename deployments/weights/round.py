"""One attempt to move the fleet from a version to the next: what it holds, and how answers are judged."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from deployments.weights.connection import Connection
from deployments.weights.members import Member, Task
from deployments.weights.protocol import (
    CommitMode,
    InFlight,
    KvCache,
    Manifest,
    Outcome,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the members answered one errand, as sentences by replica id."""

    done: frozenset[str]
    rejected: Mapping[str, str]
    broken: Mapping[str, str]
    failed: Mapping[str, str]

    @property
    def publisher_at_fault(self) -> bool:
        """Nobody could use what was sent: all who have seen it with a sound engine say so."""
        return bool(self.rejected) and not self.done

    @property
    def all_wrong(self) -> dict[str, str]:
        return {**self.rejected, **self.broken, **self.failed}

    @property
    def to_fence(self) -> dict[str, str]:
        """A broken replica always; one that rejects what others took as well."""
        return {**self.failed, **({} if self.publisher_at_fault else self.rejected)}


def judge(task: Task) -> Verdict:
    def messages(outcome: Outcome) -> dict[str, str]:
        return {
            replica_id: answer.message or f"{task.kind} {outcome.value}"
            for replica_id, answer in task.answers.items()
            if answer.outcome is outcome
        }

    return Verdict(
        done=frozenset(messages(Outcome.DONE)),
        rejected=messages(Outcome.REJECTED),
        broken=messages(Outcome.BROKEN),
        failed=messages(Outcome.FAILED),
    )


def sentence(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{replica_id}: {reason}" for replica_id, reason in reasons.items())


def digest_minority(digests: Mapping[str, str]) -> dict[str, str] | None:
    """Replicas (by id) whose combined digest differs from the majority's, with the reason.

    None when there is no majority: then nobody can say whose bytes are right.
    """
    counts = Counter(digests.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return None
    return {
        replica_id: f"its digest {digest} differs from the others' {counts[0][0]}"
        for replica_id, digest in digests.items()
        if digest != counts[0][0]
    }
