"""One attempt to move the fleet from a version to the next, and the errors that say why it was aborted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from pydantic import JsonValue

from deployments.ledger.connection import Connection
from deployments.ledger.dispatch import still_running
from deployments.ledger.limits import LedgerConfig
from deployments.ledger.members import Member, PendingCall, Verdict, join_reasons
from deployments.protocol.engine_state import InFlight
from deployments.protocol.errors import Conflict, InvalidRequest, RoundAborted, TransferAborted
from deployments.protocol.poll import (
    Check,
    CommitMode,
    FilePart,
    KvCache,
    Receive,
    Staged,
    StagingOptions,
    Swapped,
    Verification,
)
from deployments.protocol.publishing import DrainFallback, ReplicaTimings, RoundOptions, RoundReport
from deployments.protocol.responses import RoundStatus

T = TypeVar("T")


class RoundPhase(StrEnum):
    OPEN = "open"  # payloads arrive
    VERIFYING = "verifying"  # closed; digests are awaited
    VERIFIED = "verified"  # waiting only for replicas that may serve without consent
    DRAINING = "draining"  # `in_flight: wait`: requests that run come to their end
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
    drain_timeout_s: float
    drain_fallback: DrainFallback
    persist: bool = False
    file_bytes: int | None = None  # its payloads are `FilePart`s; see `RoundOptions`
    sent_bytes: int = 0  # of these
    phase: RoundPhase = RoundPhase.OPEN
    verification: Verification = Verification.NONE
    checks: tuple[Check, ...] = ()  # that all participants have made
    digest: str | None = None  # of all tensors, on which its participants agree
    close: PendingCall | None = None  # what the publisher awaits
    commits: dict[Member, PendingCall] = field(default_factory=dict)
    ordered: set[Member] = field(default_factory=set)  # those that were sent COMMIT
    swapping: set[Member] = field(default_factory=set)  # `together`: those whose COMMIT is waited for
    staged: dict[str, Staged] = field(default_factory=dict)  # by replica id
    swapped: dict[str, Swapped] = field(default_factory=dict)
    decided_for: int = 0  # participants of the decision that a restart resumes; some may be fenced since
    drained: bool = False  # no request runs, or `in_flight` is not `wait` any more
    not_drained: dict[str, int] = field(default_factory=dict)  # replica id -> requests that still ran
    left_behind: dict[str, str] = field(default_factory=dict)  # replica id -> why

    @property
    def decided(self) -> bool:
        return self.phase in DECIDED

    @property
    def hold(self) -> bool:
        """Whether a replica waits after its swap for the others: also for those that a restart forgot."""
        return self.commit is CommitMode.TOGETHER and max(self.decided_for, len(self.participants)) > 1

    @property
    def staging_options(self) -> StagingOptions:
        retained = self.version if self.persist else None
        return StagingOptions(retain_version=retained, kv_cache=self.kv_cache, in_flight=self.in_flight)

    @property
    def ends_group(self) -> bool:
        """Whether members leave the transfer group when they drop what they have staged of it."""
        in_place = any(member.updates_in_place for member in self.participants)
        return self.file_bytes is None and not in_place

    @property
    def must_drain(self) -> bool:
        return self.in_flight is InFlight.WAIT and not self.drained

    def receive(self, payload: JsonValue | FilePart) -> Receive:
        """The instruction for a replica whose part of a payload this is."""
        return Receive(round_id=self.round_id, payload=payload, options=self.staging_options)

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

    def agree(self, agreed: Sequence[Staged], *, among: int) -> None:
        """Note what the replicas whose digests are equal have checked.

        Args:
            among: how many replicas' digests were compared.
        """
        self.checks = tuple(check for check in Check if all(check in each.checks for each in agreed))
        if among > 1:
            self.verification = Verification.REPLICAS
            self.checks += (Check.REPLICAS,)
        if agreed and all(each.compared for each in agreed):
            self.verification = Verification.PUBLISHER
        if agreed and all(each.compared or each.by_name for each in agreed):
            self.digest = agreed[0].digest

    def status(self, now: float) -> RoundStatus:
        return RoundStatus(
            round_id=self.round_id,
            version=self.version,
            label=self.label,
            phase=self.phase.value,
            age_s=round(now - self.opened_at, 3),
            participants=tuple(member.replica_id for member in self.participants),
            file_bytes=self.file_bytes,
            sent_bytes=self.sent_bytes,
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
            checks=self.checks,
            digest=self.digest,
            replicas={
                member.replica_id: self._timings(member.replica_id)
                for member in self.participants
                if not member.out and member.replica_id not in self.left_behind
            },
            fenced={**self.left_behind, **out},
            not_drained=dict(self.not_drained),
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


def new_round(
    options: RoundOptions,
    config: LedgerConfig,
    *,
    round_id: int,
    version: int,
    epoch: int,
    participants: Sequence[Member],
    connection: Connection | None,
    now: float,
) -> Round:
    """A round that is open, with what its publisher chose."""
    return Round(
        round_id=round_id,
        version=version,
        label=None,
        epoch=epoch,
        opened_at=now,
        participants=tuple(participants),
        connection=connection,
        commit=_or_default(options.commit, config.commit),
        kv_cache=_or_default(options.kv_cache, config.kv_cache),
        in_flight=_or_default(options.in_flight, config.in_flight),
        drain_timeout_s=_or_default(options.drain_timeout_s, config.drain_timeout_s),
        drain_fallback=_or_default(options.drain_fallback, config.drain_fallback),
        persist=options.persist,
        file_bytes=options.file_bytes,
    )


def _or_default(option: T | None, default: T) -> T:
    """What a round's publisher chose, else what the fleet was configured with."""
    return default if option is None else option


def too_few_remain(
    current: Round, remaining: list[Member], needed: int, out: Mapping[str, str]
) -> RoundAborted:
    return RoundAborted(
        f"round {current.round_id} aborted: {len(remaining)} of {len(current.participants)} replicas "
        f"remain, at least {needed} must: {join_reasons(out)}",
        {
            "round_id": current.round_id,
            "remaining": len(remaining),
            "min_replicas": needed,
            "replicas": dict(out),
        },
    )


def not_drained(current: Round) -> RoundAborted:
    timeout_s = current.drain_timeout_s
    return RoundAborted(
        f"round {current.round_id} aborted: 'in_flight' is 'wait', and requests still ran after "
        f"drain_timeout_s = {timeout_s:g} s ({still_running(current.not_drained)}); try again, raise "
        "'weights.drain_timeout_s', or publish with drain_fallback 'keep'",
        {"round_id": current.round_id, "running": dict(current.not_drained), "timeout_s": timeout_s},
    )


def rejected_by_all(current: Round, call: PendingCall, rejected: dict[str, str]) -> InvalidRequest:
    return InvalidRequest(
        f"round {current.round_id} aborted: every replica rejected {call.name}: {join_reasons(rejected)}",
        {"round_id": current.round_id, "phase": call.name, "replicas": rejected},
    )


def files_refused(current: Round, verdict: Verdict) -> InvalidRequest | RoundAborted:
    """The files are wrong, or not the same on every host: no fault of a replica's."""
    refused = {**verdict.rejected, **verdict.transfer_failed}
    detail = {"round_id": current.round_id, "replicas": refused}
    if verdict.done:
        reasons = join_reasons(refused)
        return RoundAborted(
            f"round {current.round_id} aborted: not every replica read the same: {reasons}", detail
        )
    reason = refused[min(refused)]  # of the others it is the same, but for what cannot be read anywhere
    return InvalidRequest(
        f"round {current.round_id} aborted: no replica takes this checkpoint: {reason}", detail
    )


def transfer_failed(current: Round, replicas: dict[str, str]) -> TransferAborted:
    return TransferAborted(
        f"round {current.round_id} aborted: the transfer failed; connect again, and send the round again: "
        f"{join_reasons(replicas)}",
        {"round_id": current.round_id, "send_again": True, "replicas": replicas},
    )


def require_label(round_id: int, closed: str | None, label: str | None) -> None:
    """Whoever closes a round again closes it with its label.

    Raises:
        Conflict: it is another one.
    """
    if closed != label:
        raise Conflict(
            f"round {round_id} was closed with the label {closed!r}, by another publisher: what was to be "
            f"published as {label!r} was not; publish it again",
            {"round_id": round_id, "expected": closed, "actual": label},
        )
