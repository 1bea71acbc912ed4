"""One attempt to move the fleet from a version to the next."""

from dataclasses import dataclass, field
from enum import StrEnum

from deployments.ledger.connection import Connection
from deployments.ledger.members import Member, PendingCall
from deployments.protocol.instructions import CommitMode, KvCache, StagingOptions
from deployments.protocol.operations import InFlight
from deployments.protocol.publishing import ReplicaTimings, RoundReport
from deployments.protocol.reports import Staged, Swapped, Verification
from deployments.protocol.status import RoundStatus


class RoundPhase(StrEnum):
    OPEN = "open"  # payloads arrive
    VERIFYING = "verifying"  # closed; digests are awaited
    VERIFIED = "verified"  # waiting only for replicas that may serve without consent
    COMMITTING = "committing"  # decided: only rolls forward from here
    RELEASING = "releasing"  # all have swapped and hold; they are resumed
    COMMITTED = "committed"
    ABORTED = "aborted"


DECIDED = (RoundPhase.COMMITTING, RoundPhase.RELEASING, RoundPhase.COMMITTED)


@dataclass(slots=True, kw_only=True, eq=False)
class Round:
    """A round in flight: its participants, its options, and what the participants reported."""

    round_id: int
    version: int
    label: str | None
    epoch: int
    opened_at: float
    participants: tuple[Member, ...]
    connection: Connection | None
    commit: CommitMode
    kv_cache: KvCache
    in_flight: InFlight
    persist: bool = False
    phase: RoundPhase = RoundPhase.OPEN
    verification: Verification = Verification.NONE
    close: PendingCall | None = None  # what the publisher awaits
    commits: dict[Member, PendingCall] = field(default_factory=dict)
    ordered: set[Member] = field(default_factory=set)  # those that were sent COMMIT
    staged: dict[str, Staged] = field(default_factory=dict)  # by replica id
    swapped: dict[str, Swapped] = field(default_factory=dict)
    left_behind: dict[str, str] = field(default_factory=dict)  # replica id -> why

    @property
    def decided(self) -> bool:
        return self.phase in DECIDED

    @property
    def hold(self) -> bool:
        return self.commit is CommitMode.TOGETHER and len(self.participants) > 1

    @property
    def staging_options(self) -> StagingOptions:
        retained = self.version if self.persist else None
        return StagingOptions(retain_version=retained, kv_cache=self.kv_cache, in_flight=self.in_flight)

    def remaining(self) -> list[Member]:
        return [member for member in self.participants if member.alive]

    def record(self, call: PendingCall) -> None:
        """Keep what came with the acknowledgements."""
        for replica_id, answer in call.answers.items():
            match answer.value:
                case Staged() as staged:
                    self.staged[replica_id] = staged
                case Swapped() as swapped:
                    self.swapped[replica_id] = swapped
                case _:
                    pass

    def status(self, now: float) -> RoundStatus:
        return RoundStatus(
            round_id=self.round_id,
            version=self.version,
            label=self.label,
            phase=self.phase.value,
            age_s=round(now - self.opened_at, 3),
            participants=tuple(member.replica_id for member in self.participants),
        )

    def report(self, phase: RoundPhase, reason: str, now: float) -> RoundReport:
        """The entry in the history."""
        out = {member.replica_id: member.reason for member in self.participants if member.out}
        return RoundReport(
            round_id=self.round_id,
            version=self.version,
            label=self.label,
            epoch=self.epoch,
            phase=phase.value,
            reason=reason,
            duration_s=now - self.opened_at,
            verification=self.verification,
            replicas={
                member.replica_id: self._timings(member.replica_id)
                for member in self.participants
                if not member.out and member.replica_id not in self.left_behind
            },
            fenced={**self.left_behind, **out},
        )

    def _timings(self, replica_id: str) -> ReplicaTimings:
        staged, swapped = self.staged.get(replica_id), self.swapped.get(replica_id)
        return ReplicaTimings(
            bytes=0 if staged is None else staged.size_bytes,
            stage_s=0.0 if staged is None else staged.stage_s,
            verify_s=0.0 if staged is None else staged.verify_s,
            swap_s=0.0 if swapped is None else swapped.swap_s,
            gap_s=0.0 if swapped is None else swapped.gap_s,
        )
