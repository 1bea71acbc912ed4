"""The ledger's records: a replica, an instruction in its queue, a call that waits for several replicas, and
how they answered it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deployments.protocol.adapters import NO_ADAPTERS, AdapterState
from deployments.protocol.engine_state import EngineState
from deployments.protocol.errors import SlipstreamError
from deployments.protocol.poll import (
    Acknowledgement,
    Body,
    CatchUp,
    DesiredReplicas,
    Draining,
    Instruction,
    Outcome,
)
from deployments.protocol.responses import MemberStatus

FIRST_PATIENCE_S = 1.0


class MemberState(StrEnum):
    RETURNING = "returning"  # a member before the controller restarted; has not polled since
    JOINING = "joining"  # alive, takes no requests yet
    SERVING = "serving"
    FENCED = "fenced"  # never serves again; not gone yet
    LOST = "lost"  # gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What the last directive to a member said, for `Admission.has_updates`."""

    state: MemberState
    last_seq: int  # of the newest instruction
    may_leave: bool
    desired: DesiredReplicas


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One replica process."""

    replica_id: str
    incarnation: str
    world_size: int
    version: int
    state: MemberState
    last_poll: float
    reason: str = ""  # why it is fenced or lost
    queue: list["QueuedInstruction"] = field(default_factory=list)  # in order, not acknowledged yet
    delivered: Delivered | None = None
    was_serving: bool = False  # before the controller restarted
    condition: EngineState = ()  # paused or asleep, see `deployments.protocol.engine_state`
    retained_version: int | None = None  # its tensors wait there for the store
    loading_version: int | None = None  # as it reports: also what an earlier controller told it to load
    patience_s: float = FIRST_PATIENCE_S  # how long it waits for a round before it loads from the store
    last_report: int = 0  # the number of its newest report
    failed_transfers: int = 0  # attempts in a row in which it failed and others did not
    updates_in_place: bool = False  # RECEIVE changes its live weights
    draining: Draining | None = None  # as it reported
    leaving: bool = False  # takes no new request, and ends once it may
    drained: bool = False  # leaves, and no request is running on it
    adapters: AdapterState = NO_ADAPTERS  # as it reported
    fence_delivered: bool = False  # it knows that it is fenced; until then it may still take a request

    @property
    def alive(self) -> bool:
        return self.state in (MemberState.JOINING, MemberState.SERVING)

    @property
    def out(self) -> bool:
        return self.state in (MemberState.FENCED, MemberState.LOST)

    @property
    def loading(self) -> bool:
        """It loads a stored version, and can do nothing else meanwhile."""
        told = any(each.delivered and isinstance(each.instruction.body, CatchUp) for each in self.queue)
        return told or self.loading_version is not None

    @property
    def departing(self) -> bool:
        """Certain never to serve again: in no round or connection that is not formed yet."""
        return self.leaving and self.drained

    def has_queued(self, kind: type[Body]) -> bool:
        """Whether an instruction with a body of this class is not acknowledged yet."""
        return any(isinstance(queued.instruction.body, kind) for queued in self.queue)

    def status(self, now: float) -> MemberStatus:
        return MemberStatus(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            state="leaving" if self.leaving and self.alive else self.state.value,
            admitted=self.state is MemberState.SERVING and not self.leaving,
            version=self.version,
            world_size=self.world_size,
            silent_s=round(now - self.last_poll, 3),
            pending=tuple(queued.instruction.body.name for queued in self.queue),
            reason=self.reason,
            draining=self.draining is not None,
            running=None if self.draining is None else self.draining.running,
        )


OnComplete = Callable[["PendingCall", float], None]


@dataclass(slots=True, kw_only=True, eq=False)
class PendingCall:
    """A call that several members carry out: complete when each has answered, or is out.

    `certain`: a fenced member counts only once the fence was delivered, or it is lost; until then it might
    still take a request. `batch`: the members that this call and others wait for, where nothing follows from
    one of these calls before all are complete; None: it is alone.
    """

    name: str  # of the instruction, or of the publisher's call
    waiting: set[Member] = field(default_factory=set)
    on_complete: OnComplete | None = None
    certain: bool = False
    batch: set[Member] | None = None
    round_id: int | None = None
    answers: dict[str, Acknowledgement] = field(default_factory=dict)  # by replica id
    absent: dict[str, str] = field(default_factory=dict)  # replica id -> why it did not answer
    done: bool = False
    error: SlipstreamError | None = None
    result: Any = None

    def stop_waiting_for(self, member: Member) -> None:
        """It has answered, or will not."""
        self.waiting.discard(member)
        if self.batch is not None:
            self.batch.discard(member)

    @property
    def leads_on(self) -> bool:
        """Nobody is waited for any more, neither by this call nor by its batch."""
        return not (self.waiting or self.batch)

    def finish(self, result: Any = None, error: SlipstreamError | None = None) -> None:
        """Set the outcome; only the first one counts."""
        if not self.done:
            self.done, self.result, self.error = True, result, error


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedInstruction:
    """An instruction for one member. Its deadline runs while it is the first in the queue."""

    instruction: Instruction
    call: PendingCall | None
    due: float | None = None
    delivered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answers to a call by outcome; reasons by replica id."""

    done: frozenset[str]
    rejected: Mapping[str, str]
    transfer_failed: Mapping[str, str]
    replica_failed: Mapping[str, str]

    @property
    def publisher_at_fault(self) -> bool:
        """Every intact replica rejected what was sent."""
        return bool(self.rejected) and not self.done

    @property
    def not_done(self) -> dict[str, str]:
        return {**self.rejected, **self.transfer_failed, **self.replica_failed}

    @property
    def to_fence(self) -> dict[str, str]:
        """A failed replica always; one that rejects what others accepted as well."""
        return {**self.replica_failed, **({} if self.publisher_at_fault else self.rejected)}


def classify(call: PendingCall) -> Verdict:
    def reasons(outcome: Outcome) -> dict[str, str]:
        return {
            replica_id: answer.message or f"{call.name} {outcome.value}"
            for replica_id, answer in call.answers.items()
            if answer.outcome is outcome
        }

    return Verdict(
        done=frozenset(reasons(Outcome.DONE)),
        rejected=reasons(Outcome.REJECTED),
        transfer_failed=reasons(Outcome.TRANSFER_FAILED),
        replica_failed=reasons(Outcome.REPLICA_FAILED),
    )


def join_reasons(reasons: Mapping[str, str]) -> str:
    """Reasons by replica id in one line."""
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
