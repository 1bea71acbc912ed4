"""The ledger's records: a replica, an instruction in its queue, a call that waits for several replicas."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deployments.condition import Condition
from deployments.errors import SlipstreamError
from deployments.protocol.instructions import Body, Instruction
from deployments.protocol.reports import Acknowledgement
from deployments.protocol.status import MemberStatus


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
    committed_version: int
    epoch: int
    last_seq: int  # of the newest instruction


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
    condition: Condition = ()  # paused or asleep, see `deployments.condition`
    retained_version: int | None = None  # its tensors wait there for the store
    failed_transfers: int = 0  # attempts in a row in which it failed and others did not
    fence_delivered: bool = False  # it knows that it is fenced; until then it may still take a request

    @property
    def alive(self) -> bool:
        return self.state in (MemberState.JOINING, MemberState.SERVING)

    @property
    def out(self) -> bool:
        return self.state in (MemberState.FENCED, MemberState.LOST)

    def has_queued(self, kind: type[Body]) -> bool:
        """Whether an instruction with a body of this class is not acknowledged yet."""
        return any(isinstance(queued.instruction.body, kind) for queued in self.queue)

    def status(self, now: float) -> MemberStatus:
        return MemberStatus(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            state=self.state.value,
            admitted=self.state is MemberState.SERVING,
            version=self.version,
            world_size=self.world_size,
            silent_s=round(now - self.last_poll, 3),
            pending=tuple(queued.instruction.body.name for queued in self.queue),
            reason=self.reason,
        )


OnComplete = Callable[["PendingCall", float], None]


@dataclass(slots=True, kw_only=True, eq=False)
class PendingCall:
    """A call that several members carry out: complete when each has answered, or is out.

    `certain`: a fenced member counts only once the fence was delivered, or it is lost; until then it might
    still take a request.
    """

    name: str  # of the instruction, or of the publisher's call
    waiting: set[Member] = field(default_factory=set)
    on_complete: OnComplete | None = None
    certain: bool = False
    round_id: int | None = None
    answers: dict[str, Acknowledgement] = field(default_factory=dict)  # by replica id
    absent: dict[str, str] = field(default_factory=dict)  # replica id -> why it did not answer
    done: bool = False
    error: SlipstreamError | None = None
    result: Any = None

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
